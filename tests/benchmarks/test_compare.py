"""benchmarks/compare.py compares ratios measured on CPUs only for the same processor."""

import json

import pytest

from benchmarks import compare
from benchmarks.interleaved import cpu_name

XEON, EPYC = "Intel(R) Xeon(R) Processor", "AMD EPYC 9J14"


def write(path, ratio, cpu, device="cpu"):
    report = {
        "benchmark": "train_speed",
        "size": "12l_512",
        "settings": {},
        "machine": {"date": "2026-11-24", "device": device, "cpu": cpu},
        "ratios": {"original, eager": {"median": ratio}},
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report))
    return str(path)


@pytest.mark.parametrize(("ratio", "code"), [(1.9, 0), (1.5, 1)])
def test_a_ratio_is_compared_with_that_of_the_same_processor(tmp_path, capsys, ratio, code):
    write(tmp_path / "committed" / "xeon.json", 2.0, XEON)
    write(tmp_path / "committed" / "epyc.json", 9.0, EPYC)
    fresh = write(tmp_path / "fresh.json", ratio, XEON)
    assert compare.main([fresh, f"--committed={tmp_path / 'committed'}"]) == code
    assert "committed 2.00" in capsys.readouterr().out


def test_a_ratio_of_another_processor_is_refused(tmp_path, capsys):
    write(tmp_path / "committed" / "epyc.json", 2.6, EPYC)
    fresh = write(tmp_path / "fresh.json", 2.6, XEON)
    assert compare.main([fresh, f"--committed={tmp_path / 'committed'}"]) == 2
    printed = capsys.readouterr().out
    assert f"on {XEON}, REFUSED: committed figures are of {EPYC}" in printed


def test_an_accelerator_is_compared_whatever_its_host_is(tmp_path):
    write(tmp_path / "committed" / "one.json", 2.0, EPYC, "NVIDIA H100")
    fresh = write(tmp_path / "fresh.json", 2.0, XEON, "NVIDIA H100")
    assert compare.main([fresh, f"--committed={tmp_path / 'committed'}"]) == 0


def test_the_name_of_a_processor_tells_its_generation(tmp_path):
    info = tmp_path / "cpuinfo"
    core = "cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
    info.write_text(f"processor\t: 0\n{core}\nprocessor\t: 1\n{core}\n")
    assert cpu_name(info) == "AMD EPYC (family 25, model 1)"
    info.write_text("model name\t: Another\n")
    assert cpu_name(info) == "Another"
