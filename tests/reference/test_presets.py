"""Presets: the released models' shapes and layer patterns, and a tiny one on which a transposed state shows."""

import pytest

from reference.presets import PRESETS, preset


def test_glm_has_full_attention_at_every_fourth_of_45_layers() -> None:
    model = preset("glm-5.3-flash")
    assert model.full_attention_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43)
    assert (model.layers, model.layers - len(model.full_attention_layers)) == (45, 34)
    assert (model.hidden, model.norm_eps) == (4096, 1e-5)
    assert (model.kda.heads, model.kda.key_dim, model.kda.value_dim, model.kda.conv_width, model.kda.lower_bound) == (64, 128, 128, 4, -5.0)


def test_kimi_linear_lists_layers_from_one_and_we_from_zero() -> None:
    model = preset("kimi-linear-48b")
    assert [layer + 1 for layer in model.full_attention_layers] == [4, 8, 12, 16, 20, 24, 27]
    assert (model.layers, model.hidden, model.norm_eps) == (27, 2304, 1e-5)
    assert (model.kda.heads, model.kda.key_dim, model.kda.value_dim, model.kda.conv_width, model.kda.lower_bound) == (32, 128, 128, 4, None)


def test_a_transposed_state_does_not_fit_the_tiny_model() -> None:
    assert preset("tiny").kda.key_dim != preset("tiny").kda.value_dim


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_is_found_by_its_name_and_its_layers_exist(name: str) -> None:
    model = preset(name)
    assert model.name == name
    assert set(model.full_attention_layers) < set(range(model.layers))


def test_an_unknown_preset_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"^model: expected one of glm-5.3-flash, kimi-linear-48b, tiny, got 'glm-5'$"):
        preset("glm-5")
