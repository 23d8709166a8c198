"""What is fast: kernels under the reference's names and signatures, peers behind the same signatures, and which runs where."""
