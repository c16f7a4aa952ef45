"""Steps that are in flight for a request that has ended: more of them than there are stages."""

from pathlib import Path

import evenflow as ef

ROWS = """arrived_at,num_prefill_tokens,num_decode_tokens,max_new,priority
0.719,279,40,,0
0.850,214,34,80,1
0.924,50,14,,-1
1.080,161,15,80,0
1.080,23,40,80,1
1.080,188,32,,0
1.080,262,12,80,-1
1.122,18,21,,0
1.261,55,22,,0
1.281,70,3,80,1
1.281,190,32,80,1
"""


def test_a_preempted_request_ends_once_though_its_clients_allow_more(folder: Path) -> None:
    Path("t.csv").write_text(ROWS)
    run = ef.simulate(
        {
            "model": "Qwen3-30B-A3B",
            "gpu": "H100",
            "stages": 2,
            "costs": {"kind": "affine", "base_s": 0.02, "per_token_s": 1e-5},
            "kv": {"pages": 30, "page_tokens": 64},
            "scheduler": {
                "name": "vllm_v1",
                "max_num_batched_tokens": 64,
                "max_num_seqs": 12,
                "scheduling_policy": "priority",
            },
            "workload": {"trace": "t.csv", "arrivals": "replay"},
            "dispatch": "engine_loop",
            "max_in_flight": 9,
            "link": "nvlink-h100",
        }
    )
    assert list(run.requests.output_tokens) == [40, 34, 14, 15, 40, 32, 12, 21, 22, 3, 32]
    assert set(run.requests.status) == {"completed"}
    assert run.requests.preemptions.iloc[9] == 1
