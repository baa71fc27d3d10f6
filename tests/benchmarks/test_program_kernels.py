"""The counts of kernels, bytes and operations in compiled programs equal counts by hand."""

# ruff: noqa: E501 (the text of a program)

import textwrap

import jax.numpy as jnp
import pytest

from benchmarks import measured_step, predicted_steps, program_kernels
from benchmarks.program_kernels import Kernel, iterations, kernels
from txl_jax.model.kernels import triton
from txl_jax.model.masks import AttentionMask
from txl_jax.planning.run_programs import Flops

PROGRAM = textwrap.dedent("""\
    HloModule jit_updates

    %fused_cast (param_0: f32[4,8]) -> bf16[4,8] {
      %param_0 = f32[4,8]{1,0} parameter(0)
      ROOT %convert.1 = bf16[4,8]{1,0} convert(%param_0)
    }

    %fused_keep (param_1: f32[3,4,8], param_2: f32[4,8], param_3: s32[]) -> f32[3,4,8] {
      %param_1 = f32[3,4,8]{2,1,0} parameter(0)
      %param_2 = f32[4,8]{1,0} parameter(1)
      %param_3 = s32[] parameter(2)
      %bitcast.2 = f32[1,4,8]{2,1,0} bitcast(%param_2)
      ROOT %dynamic-update-slice.1 = f32[3,4,8]{2,1,0} dynamic-update-slice(%param_1, %bitcast.2, %param_3)
    }

    %fused_slice (param_4: f32[3,4,8], param_5: s32[]) -> f32[1,4,8] {
      %param_4 = f32[3,4,8]{2,1,0} parameter(0)
      %param_5 = s32[] parameter(1)
      ROOT %dynamic-slice.1 = f32[1,4,8]{2,1,0} dynamic-slice(%param_4, %param_5), dynamic_slice_sizes={1,4,8}
    }

    %gemm (param_6: bf16[4,8], param_7: bf16[8,16]) -> bf16[4,16] {
      %param_6 = bf16[4,8]{1,0} parameter(0)
      %param_7 = bf16[8,16]{1,0} parameter(1)
      ROOT %dot.1 = bf16[4,16]{1,0} dot(%param_6, %param_7), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    }

    %body (state: (s32[], f32[3,4,8], f32[4,8])) -> (s32[], f32[3,4,8], f32[4,8]) {
      %state = (s32[], f32[3,4,8]{2,1,0}, f32[4,8]{1,0}) parameter(0)
      %n = s32[] get-tuple-element(%state), index=0
      %kept = f32[3,4,8]{2,1,0} get-tuple-element(%state), index=1
      %x = f32[4,8]{1,0} get-tuple-element(%state), index=2
      %keep = f32[3,4,8]{2,1,0} fusion(%kept, %x, %n), kind=kLoop, calls=%fused_keep, metadata={op_name="jit(updates)/jvp(TransformerXL.nll)/while/body/feed_forward/dot"}
      ROOT %next = (s32[], f32[3,4,8]{2,1,0}, f32[4,8]{1,0}) tuple(%n, %keep, %x)
    }

    %condition (state.1: (s32[], f32[3,4,8], f32[4,8])) -> pred[] {
      %state.1 = (s32[], f32[3,4,8]{2,1,0}, f32[4,8]{1,0}) parameter(0)
      ROOT %constant.1 = pred[] constant(true)
    }

    ENTRY %main (a: f32[4,8], b: bf16[8,16], kept.1: f32[3,4,8], n.1: s32[]) -> f32[] {
      %a = f32[4,8]{1,0} parameter(0)
      %b = bf16[8,16]{1,0} parameter(1)
      %kept.1 = f32[3,4,8]{2,1,0} parameter(2)
      %n.1 = s32[] parameter(3)
      %cast = bf16[4,8]{1,0} fusion(%a), kind=kLoop, calls=%fused_cast
      %product = bf16[4,16]{1,0} fusion(%cast, %b), kind=kCustom, calls=%gemm, metadata={op_name="jit(updates)/transpose(jvp(TransformerXL.nll))/attention/dot_general"}
      %library = (bf16[4,16]{1,0}, s8[4096]{0}) custom-call(%cast, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
      %start = (s32[], f32[3,4,8]{2,1,0}, f32[4,8]{1,0}) tuple(%n.1, %kept.1, %a)
      %loop = (s32[], f32[3,4,8]{2,1,0}, f32[4,8]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
      %all = f32[3,4,8]{2,1,0} get-tuple-element(%loop), index=1
      %one = f32[1,4,8]{2,1,0} fusion(%all, %n.1), kind=kLoop, calls=%fused_slice
      %sum = f32[1,4,8]{2,1,0} all-reduce-start(%one), replica_groups={}, to_apply=%add
      ROOT %done = f32[1,4,8]{2,1,0} all-reduce-done(%sum)
    }
    """)  # fmt: skip


ON_TPU = textwrap.dedent("""\
    HloModule jit_updates

    %copy_fusion (param_0: bf16[3,4,8]) -> bf16[3,4,8] {
      %param_0 = bf16[3,4,8]{2,1,0} parameter(0)
      ROOT %copy.1 = bf16[3,4,8]{2,1,0} copy(%param_0)
    }

    %sliced (param_1: bf16[3,4,8], param_2: s32[]) -> bf16[4,8] {
      %param_1 = bf16[3,4,8]{2,1,0} parameter(0)
      %param_2 = s32[] parameter(1)
      %one = bf16[1,4,8]{2,1,0} dynamic-slice(%param_1, %param_2), dynamic_slice_sizes={1,4,8}
      ROOT %bitcast.1 = bf16[4,8]{1,0} bitcast(%one)
    }

    %multiply (param_3: bf16[3,4,8], param_4: bf16[8,16], param_5: s32[]) -> (bf16[4,16], bf16[4,16]) {
      %param_3 = bf16[3,4,8]{2,1,0} parameter(0)
      %same = bf16[3,4,8]{2,1,0} fusion(%param_3), kind=kLoop, calls=%copy_fusion
      %param_5 = s32[] parameter(2)
      %rows = bf16[4,8]{1,0} fusion(%same, %param_5), kind=kLoop, calls=%sliced
      %param_4 = bf16[8,16]{1,0} parameter(1)
      %convolution.1 = bf16[4,16]{1,0} convolution(%rows, %param_4), dim_labels=bf_io->bf
      ROOT %both = (bf16[4,16]{1,0}, bf16[4,16]{1,0}) tuple(%convolution.1, %convolution.1)
    }

    %body (state: (s32[], bf16[3,4,8], bf16[8,16])) -> (s32[], bf16[3,4,8], bf16[8,16]) {
      %state = (s32[], bf16[3,4,8]{2,1,0}, bf16[8,16]{1,0:S(1)}) parameter(0)
      %n = s32[] get-tuple-element(%state), index=0
      %kept = bf16[3,4,8]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
      %matrix = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state), index=2
      %product = (bf16[4,16]{1,0:T(8,128)(2,1)}, bf16[4,16]{1,0:T(8,128)(2,1)S(1)}) fusion(%kept, %matrix, %n), kind=kOutput, calls=%multiply, backend_config={"window_config":{"estimated_cycles":"700"}}
      ROOT %next = (s32[], bf16[3,4,8]{2,1,0}, bf16[8,16]{1,0:S(1)}) tuple(%n, %kept, %matrix)
    }

    %condition (state.1: (s32[], bf16[3,4,8], bf16[8,16])) -> pred[] {
      %limit = s32[]{:T(128)} constant(5)
      %state.1 = (s32[], bf16[3,4,8]{2,1,0}, bf16[8,16]{1,0:S(1)}) parameter(0)
      %counter = s32[]{:T(128)} get-tuple-element(%state.1), index=0
      ROOT %less = pred[]{:T(512)} compare(%counter, %limit), direction=LT
    }

    ENTRY %main (a: bf16[3,4,8], b: bf16[8,16], n.1: s32[]) -> bf16[2,3,8] {
      %a = bf16[3,4,8]{2,1,0:T(8,128)(2,1)} parameter(0)
      %b = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(1)
      %n.1 = s32[] parameter(2)
      %fetch = (bf16[8,16]{1,0:T(8,128)(2,1)S(1)}, bf16[8,16]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b)
      %fetched = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} copy-done(%fetch)
      %part = ((bf16[3,4,8]{2,1,0:T(8,128)(2,1)}), bf16[1,4,8]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) slice-start(%a), slice={[0:1], [0:4], [0:8]}
      %parted = bf16[1,4,8]{2,1,0:T(8,128)(2,1)} slice-done(%part)
      %room = bf16[64,64]{1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
      %start = (s32[], bf16[3,4,8]{2,1,0}, bf16[8,16]{1,0:S(1)}) tuple(%n.1, %a, %fetched)
      %loop = (s32[], bf16[3,4,8]{2,1,0}, bf16[8,16]{1,0:S(1)}) while(%start), condition=%condition, body=%body
      ROOT %attend = bf16[2,3,8]{2,1,0} custom-call(%parted), custom_call_target="tpu_custom_call"
    }
    """)  # fmt: skip


@pytest.fixture(scope="module")
def on_tpu():
    return {k.name: k for k in kernels(ON_TPU)}


def test_on_a_tpu_only_bytes_of_its_memory_count_and_a_loop_has_its_limit(on_tpu):
    assert {name: k.times for name, k in on_tpu.items()} == {
        "fetch": 1,
        "part": 1,
        "product": 5,
        "attend": 1,
    }
    product = on_tpu["product"]
    assert (product.kind, product.cycles, product.flops) == ("product", 700, 2 * 4 * 8 * 16)
    assert product.read == 1 * 4 * 8 * 2 + 4  # a slice, read through two fusions; the loop counter
    assert product.written == 4 * 16 * 2  # the second result stays on the chip
    assert (on_tpu["fetch"].read, on_tpu["fetch"].written) == (8 * 16 * 2, 0)
    assert (on_tpu["part"].read, on_tpu["part"].written) == (64, 64)
    assert on_tpu["attend"].target == "tpu_custom_call"


def test_a_fusion_that_starts_a_collective_is_one_and_what_waits_for_it_is_no_kernel():
    text = textwrap.dedent("""\
        %starts (p: bf16[4,2]) -> (bf16[4,2], bf16[4,8], u32[]) {
          %p = bf16[4,2]{1,0} parameter(0)
          %gather = bf16[4,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={1}
          ROOT %begin = (bf16[4,2]{1,0}, bf16[4,8]{1,0}, u32[]{:S(2)}) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
        }

        %waits (q: (bf16[4,2], bf16[4,8], u32[])) -> bf16[4,8] {
          %q = (bf16[4,2]{1,0}, bf16[4,8]{1,0}, u32[]{:S(2)}) parameter(0)
          ROOT %end = bf16[4,8]{1,0} custom-call(%q), custom_call_target="AsyncCollectiveDone"
        }

        ENTRY %main (a: bf16[4,2]) -> bf16[4,8] {
          %a = bf16[4,2]{1,0} parameter(0)
          %started = (bf16[4,2]{1,0}, bf16[4,8]{1,0}, u32[]{:S(2)}) fusion(%a), kind=kCustom, calls=%starts
          ROOT %gathered = bf16[4,8]{1,0} fusion(%started), kind=kCustom, calls=%waits
        }
        """)  # fmt: skip
    (kernel,) = kernels(text)
    assert (kernel.name, kernel.kind) == ("started", "all-gather")
    assert (kernel.read, kernel.written) == (4 * 2 * 2, 0)


def test_a_fused_sort_writes_its_keys_and_its_values():
    """The root instruction of a fused sort has two results, but is no ``tuple`` instruction."""
    text = textwrap.dedent("""\
        HloModule jit_f

        %wrapped_sort_computation (param_0: s32[64], param_1: f32[64]) -> (s32[64], f32[64]) {
          %param_0 = s32[64]{0} parameter(0)
          %param_1 = f32[64]{0} parameter(1)
          ROOT %sort.1 = (s32[64]{0}, f32[64]{0}) sort(%param_0, %param_1), dimensions={0}, to_apply=%less
        }

        ENTRY %main (a: s32[64], b: f32[64]) -> (s32[64], f32[64]) {
          %a = s32[64]{0} parameter(0)
          %b = f32[64]{0} parameter(1)
          ROOT %sort = (s32[64]{0}, f32[64]{0}) fusion(%a, %b), kind=kInput, calls=%wrapped_sort_computation
        }
        """)
    (sort,) = kernels(text)
    assert (sort.read, sort.written) == (512, 512)


def test_padding_of_a_convolution_takes_no_operations():
    """The window covers two positions. For each result, one is data and the other is padding."""
    text = textwrap.dedent("""\
        ENTRY %main (a: bf16[1,3,5,1], b: bf16[2,7,5,1]) -> bf16[2,3,7,1] {
          %a = bf16[1,3,5,1]{3,2,1,0} parameter(0)
          %b = bf16[2,7,5,1]{3,2,1,0} parameter(1)
          ROOT %heads = bf16[2,3,7,1]{3,2,1,0} convolution(%a, %b), window={size=2x1 pad=1_1x0_0 rhs_reversal=1x0}, dim_labels=0bf1_0oi1->0bf1
        }
        """)  # fmt: skip
    assert [k.flops for k in kernels(text)] == [2 * 3 * 7 * 5 * 2]


def test_of_a_conditional_the_branch_that_moves_the_most_counts():
    switched = textwrap.dedent("""\
        %none (a.1: f32[4,8]) -> f32[4,8] {
          ROOT %a.1 = f32[4,8]{1,0} parameter(0)
        }

        %half (a.2: f32[4,8]) -> f32[4,8] {
          %a.2 = f32[4,8]{1,0} parameter(0)
          %part = f32[2,8]{1,0} slice(%a.2), slice={[0:2], [0:8]}
          ROOT %few = f32[4,8]{1,0} pad(%part), padding=0_2x0_0
        }

        %whole (a.3: f32[4,8]) -> f32[4,8] {
          %a.3 = f32[4,8]{1,0} parameter(0)
          %twice = f32[4,8]{1,0} add(%a.3, %a.3)
          ROOT %more = f32[4,8]{1,0} add(%twice, %a.3)
        }

        ENTRY %main (i: s32[], a: f32[4,8]) -> f32[4,8] {
          %i = s32[] parameter(0)
          %a = f32[4,8]{1,0} parameter(1)
          ROOT %c = f32[4,8]{1,0} conditional(%i, %a, %a, %a), branch_computations={%none, %whole, %half}
        }
        """)
    assert [k.name for k in kernels(switched)] == ["twice", "more"]


@pytest.fixture(scope="module")
def found():
    return {k.name: k for k in kernels(PROGRAM)}


def test_only_what_runs_is_a_kernel_and_a_loops_body_runs_as_often_as_the_loop(found):
    times = {name: k.times for name, k in found.items()}
    assert times == {"cast": 1, "product": 1, "library": 1, "keep": 3, "one": 1, "sum": 1}


def test_an_iteration_of_a_loop_has_the_kernels_of_its_body_once():
    assert [[(k.name, k.times) for k in loop] for loop in iterations(PROGRAM)] == [[("keep", 1)]]


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        ("cast", 4 * 8 * 4, 4 * 8 * 2),
        ("product", 4 * 8 * 2 + 8 * 16 * 2, 4 * 16 * 2),
        ("library", 4 * 8 * 2 + 8 * 16 * 2, 4 * 16 * 2),  # the library's workspace is not counted
        ("keep", 4 * 8 * 4 + 4, 4 * 8 * 4),  # reads the new slice and its index
        ("one", 4 * 8 * 4 + 4, 4 * 8 * 4),
    ],
)
def test_bytes_are_those_of_the_parts_that_are_read_and_written(found, name, read, written):
    assert (found[name].read, found[name].written) == (read, written)


def test_kinds_operations_and_places_are_read_from_the_text(found):
    assert {name: k.kind for name, k in found.items()} == {
        **dict.fromkeys(("cast", "keep", "one"), "elementwise"),
        **dict.fromkeys(("product", "library"), "product"),
        "sum": "all-reduce",
    }
    assert found["product"].flops == found["library"].flops == 2 * 4 * 8 * 16
    assert found["cast"].flops == 0
    assert found["product"].source == "attention, gradient"
    assert found["keep"].source == "feed_forward"
    assert found["cast"].source == "optimizer and rest"


def form(t: int, m: int, h: int, reach: int | None = None) -> triton.Form:
    reach = m + t - 1 if reach is None else reach
    return triton.Form(1, 1, t, m + t, h, m + t, m + t - 1 - reach, 0, 90)


def test_tiles_cover_what_the_queries_see_and_only_the_last_ones_cross_the_edge():
    tiles = lambda f: predicted_steps.tiles("forward", jnp.bfloat16, f)  # unit: 64 x 64 tiles
    assert tiles(form(256, 128, 64)) == (2 + 3 + 4 + 5, 4)
    assert tiles(form(64, 64, 64, reach=63)) == (0, 2)  # the mask of a window has two edges


@pytest.mark.parametrize(("t", "m", "reach"), [(768, 768, 1535), (150, 150, 299), (300, 64, 63)])
@pytest.mark.parametrize("h", [64, 128])
def test_gradients_of_keys_have_edges_where_the_kernel_is_told_of_them(t, m, reach, h):
    f = form(t, m, h, reach)
    mask = AttentionMask(jnp.full(1, m), None, t, m, reach)
    sizes = triton.tiling("gradient_of_keys", jnp.bfloat16, f).sizes
    begin, whole, edge, end = triton._spans(f.k, sizes, *mask.interval())[0].T
    block = sizes["SQ"] * sizes["SK"] / 4096
    expected = (edge - whole).sum() * block, (whole - begin + end - edge).sum() * block
    assert predicted_steps.tiles("gradient_of_keys", jnp.bfloat16, f) == expected


@pytest.mark.parametrize(
    ("f", "counts"),
    [(form(768, 768, 128), (240, 384, 252)), (form(384, 384, 64), (60, 66, 66))],
    ids=["enwik8_24l", "wt103_large"],
)
def test_shifted_tiles_are_those_that_the_loops_visit(f, counts):
    """Counts come from following the loops by hand; test_kernels_triton.py runs the loops."""
    kernels = ("position_scores", "gradient_of_queries", "gradient_of_distances")
    found = [predicted_steps.tiles(kernel, jnp.bfloat16, f) for kernel in kernels]
    assert found == [(count, 0) for count in counts]


def test_a_kernel_takes_its_slowest_part_and_an_update_their_sum():
    copy = Kernel("copy", "elementwise", "attention", 2, 3 * 10**9, 15 * 10**6)
    product = Kernel("dot", "product", "attention", 1, 0, 0, flops=10**12)
    reduced = Kernel("sum", "all-reduce", "rest", 1, 450 * 10**6, 0, sent=900 * 10**6)
    fused = {"fwd": predicted_steps.Attention("forward", 1e9, 1.0)}
    attention = Kernel("fwd", "library", "attention", 1, 0, 0)
    took = lambda k: predicted_steps.took(k, fused, "h100")
    assert took(copy) == pytest.approx(1.8e-3)  # at half of 3,350 GB/s
    assert took(product) == pytest.approx(1 / (0.75 * 989))
    assert took(reduced) == pytest.approx(2e-3)  # 900 MB at 450 GB/s
    assert took(attention) == pytest.approx(1 / (0.8 * 1.98 * 132))
    lines = list(
        predicted_steps.report(
            [copy, product, reduced, attention], fused, Flops(1e12, 0.0, 1e12), "h100", 0.010
        )
    )
    whole = 2 * took(copy) + took(product) + took(reduced) + took(attention)
    assert lines[-2].startswith("| update, exchange shown")
    assert lines[-2].endswith(f" {1e3 * whole:.1f} |")
    assert lines[-1].startswith(f"| update, measured: {1e12 / 0.01 / 989e12:.1%} of the peak")


COLLECTIVES = textwrap.dedent("""\
    HloModule jit_f

    %add (a: f32[], b: f32[]) -> f32[] {
      %a = f32[] parameter(0)
      %b = f32[] parameter(1)
      ROOT %sum = f32[] add(%a, %b)
    }

    ENTRY %main (x: f32[1000,1000], part: f32[125,1000]) -> f32[] {
      %x = f32[1000,1000]{1,0} parameter(0)
      %part = f32[125,1000]{1,0} parameter(1)
      %all-reduce-start = f32[1000,1000]{1,0} all-reduce-start(%x), to_apply=%add
      %all-gather-start = (f32[125,1000]{1,0}, f32[1000,1000]{1,0}) all-gather-start(%part), dimensions={0}
      %copy.1 = f32[1000,1000]{1,0} copy(%x)
      %all-reduce-done = f32[1000,1000]{1,0} all-reduce-done(%all-reduce-start)
      %copy.2 = f32[1000,1000]{1,0} copy(%all-reduce-done)
      %all-gather-done = f32[1000,1000]{1,0} all-gather-done(%all-gather-start)
      ROOT %all-reduce.2 = f32[1000,1000]{1,0} all-reduce(%copy.2), to_apply=%add
    }
    """)


def test_collectives_run_beside_the_kernels_between_their_start_and_where_they_are_awaited():
    schedule = program_kernels.schedule(COLLECTIVES)
    assert [(k.name, k.kind, k.sent) for k in schedule] == [
        ("all-reduce-start", "all-reduce", 8_000_000),
        ("all-gather-start", "all-gather", 4_000_000),
        ("copy.1", "elementwise", 0),
        ("all-reduce-start", program_kernels.WAIT, 0),
        ("copy.2", "elementwise", 0),
        ("all-gather-start", program_kernels.WAIT, 0),
        ("all-reduce.2", "all-reduce", 8_000_000),
    ]
    assert kernels(COLLECTIVES) == [k for k in schedule if k.kind != program_kernels.WAIT]
    reduce, gather, copy = 8e6 / 450e9, 4e6 / 450e9, 8e6 / (0.5 * 3350e9)
    assert copy < gather  # the copy ends first, so the program waits for the gather
    found = predicted_steps.scheduled(schedule, {}, "h100")
    assert found == pytest.approx(max(reduce + copy, reduce + gather) + reduce)
    beside = [k for k in schedule if k.kind == "elementwise"] * 9
    found = predicted_steps.scheduled([schedule[0], *beside, schedule[3]], {}, "h100")
    assert found == pytest.approx(18 * copy)
    found = predicted_steps.scheduled([schedule[0], schedule[3], beside[0]], {}, "h100")
    assert found == pytest.approx(reduce + copy)  # no kernel runs during the all-reduce


def test_measured_launches_are_summed_by_part_whatever_separates_their_numbers():
    text = PROGRAM.replace("%keep =", "%keep.4 =").replace("%keep,", "%keep.4,")
    launches = [("keep.4", "a", 0.5)] * 3 + [("cast.77", "b", 5.0), ("keep_4", "c", 1.0)]
    launches += [("graph", "keep_4", 0.25), ("graph", "nvjet_sm90_tst", 8.0)]
    assert measured_step.summed(measured_step.parts(launches, text)) == [
        ("product: in a graph", 8.0, 1.0),
        ("not in the program", 5.0, 1.0),
        ("elementwise: feed_forward", 2.75, 5.0),
    ]
