"""What is taken out of command lines, settings and messages before they are written, and what is left alone."""

from __future__ import annotations

import random
import string

import pytest

from dsprof.collectors.hooking.errors import describe
from dsprof.redact import known_secrets, looks_random, redact_data, redact_setting, redact_text, redact_words
from dsprof.run import RunInfo

SHA = "0123456789abcdef0123456789abcdef01234567"
R = "[redacted]"
WORD = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("train.py --api-key hunter2 --lr 0.1", f"train.py --api-key {R} --lr 0.1"),
        ("train.py --api_key=hunter2", f"train.py --api_key={R}"),
        ("env TOKEN=hunter2 python train.py", f"env TOKEN={R} python train.py"),
        ("env HF_TOKEN=x AWS_SECRET_ACCESS_KEY=y job", f"env HF_TOKEN={R} AWS_SECRET_ACCESS_KEY={R} job"),
        ("x --db-password 123456 --verbose", f"x --db-password {R} --verbose"),
        ("x model.wandb.key=hunter2 +trainer.secret=a", f"x model.wandb.key={R} +trainer.secret={R}"),
        ("x --OpenAIApiKey a --clientSecret b", f"x --OpenAIApiKey {R} --clientSecret {R}"),
        ("x OPENAI_API_KEY_PROD=a API_KEY_2=b", f"x OPENAI_API_KEY_PROD={R} API_KEY_2={R}"),
        ("x postgres://me:hunter2@host/db", f"x postgres://me:{R}@host/db"),
        ("pip install git+https://ghp_0123456789012345678901234567@github.com/a", f"pip install git+https://{R}@github.com/a"),
        ("x --store=s3://b?X-Amz-Signature=0123456789abcdef01&a=1", f"x --store=s3://b?X-Amz-Signature={R}&a=1"),
        ("x AKIAIOSFODNN7EXAMPLE", f"x {R}"),
        (f"wandb login {SHA}", f"wandb login {R}"),
        (f"x hf_{WORD} sk-{WORD} xoxb-{WORD} eyJ{WORD}.{WORD}.{WORD}", f"x {R} {R} {R} {R}"),
        ("curl -u me:hunter2 --user bob", f"curl -u me:{R} --user bob"),
    ],
)  # fmt: skip
def test_a_command_line(typed: str, kept: str) -> None:
    words = redact_words(typed.split())
    assert " ".join(words) == kept
    assert redact_words(words) == words, "twice is once"


@pytest.mark.parametrize(
    "typed",
    [
        "train.py --tokenizer gpt2 --max-tokens 512 --key-dim 64 --num-key-value-heads 8 --pad-token <pad>",
        "train.py --eos-token </s> --token 5 --max_new_tokens=20 --tokens-per-batch=4096 --add-eos-token true",
        f"train.py --revision {SHA} --commit={SHA} --data /data/snapshots/{SHA}/train",
        "train.py --sort-key length --label-key text --partition-key=rank --image-token-id 5 --key name",
        "train.py --model meta-llama/Meta-Llama-3-1-70B-Instruct-GPTQ-INT4 --dataset HuggingFaceFW/fineweb-edu",
        "PWD=/home/me OLDPWD=/ --password-file /etc/key --secret-name prod --auth kerberos --user bob",
        "train.py --token $HF_TOKEN --api-key-file k --pass 3 --bypass yes --compass north --secretary x",
        "srun --nodes=2 --export=ALL python -m pkg.train trainer.precision=bf16 optimizer.betas=[0.9,0.95]",
        "train.py --config deepspeed_config_zero3.json --lr 1e-4 --warmup 0.03 --attn flash_attention_2",
        "train.py s3://bucket/prefix/shard-{000000..000999}.tar https://user@host/x ssh://git@github.com/a/b",
    ],
)
def test_ordinary_arguments_stay(typed: str) -> None:
    assert redact_words(typed.split()) == typed.split()


def test_a_value_that_holds_several_settings() -> None:
    words = [
        "--config",
        '{"wandb": {"api_key": "hunter2"}, "lr": 0.1}',
        "-c",
        "export TOKEN=a1; x --password 'b c' --lr 1",
    ]
    assert redact_words(words) == [
        "--config", f'{{"wandb": {{"api_key": "{R}"}}, "lr": 0.1}}',
        "-c", f"export TOKEN={R}; x --password '{R}' --lr 1",
    ]  # fmt: skip
    assert redact_words(["-H", "Authorization: Bearer abc.def-ghi"]) == ["-H", f"Authorization: Bearer {R}"]
    assert redact_words(["--header=X-Api-Key: hunter2"]) == [f"--header=X-Api-Key: {R}"]


def test_nested_settings() -> None:
    given = {
        "wandb": {"key": "hunter2", "project": "p", "entity": None},
        "env": [{"name": "HF_TOKEN", "value": "hunter2"}, {"name": "OMP_NUM_THREADS", "value": "4"}],
        "credentials": {"user": "me", "parts": ["a", 5], "none": None},
        "optimizer": {"lr": 0.1, "tokens": 5, "token": 7}, "password": 5, "has_password": True,
        "url": "redis://:hunter2@host", "tokenizer": "gpt2",
    }  # fmt: skip
    assert redact_data(given) == {
        "wandb": {"key": R, "project": "p", "entity": None},
        "env": [{"name": "HF_TOKEN", "value": R}, {"name": "OMP_NUM_THREADS", "value": "4"}],
        "credentials": {"user": R, "parts": [R, R], "none": None},
        "optimizer": {"lr": 0.1, "tokens": 5, "token": 7}, "password": R, "has_password": True,
        "url": f"redis://:{R}@host", "tokenizer": "gpt2",
    }  # fmt: skip
    assert redact_setting("PYTORCH_ALLOC_CONF", "expandable_segments:True") == "expandable_segments:True"
    assert redact_setting("HF_TOKEN", "hunter2") == R


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("Command '['x', '--api-key', 'hunter2']' died", f"Command '['x', '--api-key', '{R}']' died"),
        ("401 for https://me:hunter2@host/x?a=1", f"401 for https://me:{R}@host/x?a=1"),
        ("invalid token: abc123xyz9", f"invalid token: {R}"),
        ("DB_PASSWORD='hunter2' is wrong", f"DB_PASSWORD='{R}' is wrong"),
        ("bad header Bearer abcdef0123456789", f"bad header Bearer {R}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- end", f"{R} end"),
    ],
)
def test_a_message(said: str, kept: str) -> None:
    assert redact_text(said) == kept
    assert redact_text(kept) == kept


@pytest.mark.parametrize(
    "said",
    [
        "KeyError: 'token'", "unexpected token: word at line 3", "RuntimeError: size of key (64) is not that of value",
        "train.py:12: the tokens: 512, key: query, value: 3", f"commit {SHA} of torch", "keys: a, b; pass: 3",
        "CUDA error: an illegal memory access was encountered at ../aten/src/ATen/native/cuda/Loss.cu:240",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
    ],
)  # fmt: skip
def test_ordinary_messages_stay(said: str) -> None:
    assert redact_text(said) == said


def test_what_the_environment_has_under_a_secret_name_is_no_part_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message need not say what it names."""
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plain-looking-words")
    monkeypatch.setenv("HOME_TOKEN", "postgres")  # an ordinary word, which stands for other things, too
    assert redact_text("no entry for plain-looking-words in postgres") == f"no entry for {R} in postgres"
    assert describe(ValueError("plain-looking-words")) == f"ValueError: {R}"
    assert known_secrets({}, ["x", "--api-key", "abcdefgh1", "--password=abcdefgh2", "--lr", "abcdefgh3"]) == (
        "abcdefgh1", "abcdefgh2",
    )  # fmt: skip


def test_random_texts_look_random_and_names_do_not() -> None:
    chance = random.Random(0)
    letters = string.ascii_letters + string.digits
    drawn = ["".join(chance.choices(letters, k=40)) for _ in range(500)]
    assert sum(map(looks_random, drawn)) > 480
    assert not looks_random("Meta-Llama-3-1-70B-Instruct-GPTQ-INT4-AWQ-Marlin24")
    assert not looks_random("TransformerDecoderLayerWithCrossAttentionV2Fused")
    assert not looks_random(SHA)


def test_the_command_of_an_older_run_is_redacted_when_it_is_read() -> None:
    text = RunInfo("a", "a", ["dsprof", "run", "train.py", "--api-key", "hunter2"]).to_json()
    assert RunInfo.from_json(text).command == ["dsprof", "run", "train.py", "--api-key", R]
