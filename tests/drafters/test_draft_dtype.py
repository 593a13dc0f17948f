"""The formats of a drafter's weights: the target's where it is quantised and `dtype` is auto, else those asked for."""

import gguf
import pytest

from specengine.bench.race.draft_cost import Eagle3
from specengine.drafters import load_drafter
from specengine.models.presets import PRESETS
from tests.drafters.glide_files import glide_state
from tests.drafters.glide_files import write as write_glide
from tests.drafters.medusa_files import heads_state
from tests.drafters.medusa_files import write as write_medusa
from tests.engines import tiny_model
from tests.models.files import random_state, write_folder
from tests.models.gguf_files import Type, write_gguf

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
BLOCKS = {"float32": {"float32"}, "int8": {"q8"}, "int4": {"q4_min"}}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "eagle3": "eagle3:random:tiny-llama",
        "fasteagle": "fasteagle:random:tiny-llama",
        "medusa": f"medusa:{write_medusa(folder / 'medusa', heads_state())}",
        "glide": f"glide:{write_glide(folder / 'glide', glide_state())}",
        "draft-model": f"draft-model:{write_folder(folder / 'model', random_state(PRESETS['tiny-llama']))}",
    }


def formats_of(text: str, dtype: str) -> set[str]:
    """The formats of a drafter beside a target of this dtype."""
    drafter = load_drafter(text, tiny_model(dtype=dtype).target)
    projections = drafter.small.model.projections[1:] if hasattr(drafter, "small") else drafter.projections
    shared = tiny_model(dtype=dtype).target.head
    return {weight.format for part in projections if part is not shared for weight in part.weights}


@pytest.mark.parametrize("target", BLOCKS)
@pytest.mark.parametrize("name", ["eagle3", "fasteagle", "medusa", "glide", "draft-model"])
def test_weights_take_the_target_s_format_unless_one_is_asked_for(drafters, name, target):
    assert formats_of(drafters[name], target) == BLOCKS[target]
    asked = "int8" if target == "int4" else "int4"
    assert BLOCKS[asked] <= formats_of(f"{drafters[name]},dtype={asked}", target) != BLOCKS[target]


def test_a_draft_model_in_a_quantised_file_keeps_its_formats(tmp_path):
    state = random_state(PRESETS["tiny-llama"])
    blocks = {
        n: (gguf.quants.quantize(x.numpy(), Type.Q8_0), Type.Q8_0) if x.ndim == 2 else x for n, x in state.items()
    }
    path = write_gguf(tmp_path / "m.gguf", PRESETS["tiny-llama"], blocks)
    assert formats_of(f"draft-model:{path}", "int4") == {"q8"}


@pytest.mark.parametrize("target", BLOCKS)
def test_the_cost_of_a_drafter_is_that_of_weights_in_the_target_s_format(target):
    net = Eagle3(tiny_model(dtype=target).target, levels=2, k=1).net
    assert {weight.format for part in net.projections for weight in part.weights} == BLOCKS[target]
