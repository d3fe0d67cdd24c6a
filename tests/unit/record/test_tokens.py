"""What counts as a secret, and what is written in its place."""

import shlex

import pytest

from entrypoint.record import tokens

ENV = {"WANDB_API_KEY": "0123456789abcdef", "HOME": "/home/a", "SHORT_TOKEN": "a", "PWD": "/home/a/project"}
ENV |= {"APPTRAIN_PASS": "PYTHONPATH", "APPTRAIN_IMAGE": "/image.sif"}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("hf_abcdefghijklmnopqrstuvwxyz", "<secret>"),
        ("hf_trainer.py -m hf_finetuning", "hf_trainer.py -m hf_finetuning"),
        ("--key=0123456789abcdef", "--key=<secret WANDB_API_KEY>"),
        ("use 0123456789abcdef", "use <secret WANDB_API_KEY>"),
        ("https://me:ghs@host/x.git", "https://<secret>@host/x.git"),
        ("git@host:x.git", "git@host:x.git"),
        ("api_key=abc", "api_key=<secret>"),
        ('password: "correct horse"', 'password: "<secret>"'),
        ("/home/a/script.py", "/home/a/script.py"),
    ],
)
def test_a_text_is_written_without_its_secrets(text: str, hidden: str) -> None:
    assert tokens.hide(text, ENV) == hidden
    assert tokens.hide(hidden, ENV) == hidden


SECRET = "Zq7-pLum"
COMMANDS = (
    *(
        "--password {}",
        "--token={}",
        "--api-key={}",
        "--api_key {}",
        "--apiKey={}",
        "--pass {}",
        "--pwd={}",
        "--hub-token {}",
    ),
    *(
        "--passphrase {}",
        "--cookie {}",
        "--hf-token -{}",
        "--token -{}",
        "--secret {}",
        "--auth {}",
        "--db.password {}",
    ),
    *(
        "postgresql://u:{}@h/db",
        "postgresql://u:p@{}@h/db",
        "https://{}@github.com/x",
        "--db=mysql://u:{}@h",
    ),
    *(
        "--header 'Authorization: Bearer {}'",
        "-H 'Authorization: Basic {}'",
        "-H 'X-API-Key: {}'",
        "-H 'Cookie: a={}'",
    ),
    *(
        "--header=Authorization:{}",
        "https://h/x?sig={}&se=1",
        "https://h/x?a=1&X-Amz-Signature={}",
        "https://h?token={}",
    ),
    *("https://hooks.slack.com/services/T0/B0/{}", "https://discord.com/api/webhooks/1/{}", "+hub.token={}"),
    *(
        "token='{} and more'",
        "logger.wandb_api_key={}",
        "env.AWS_SECRET_ACCESS_KEY={}",
        "bash -c 'HF_TOKEN={} python x.py'",
        "bash -c 'python x.py --wandb-key {} --epochs 3'",
        "bash -c 'cd /x; python x.py --api_key \"{}\"'",
    ),
    *(
        "bash -c 'wandb login {}{}'",
        '\'{{"password": "{}"}}\'',
        "'password: {}'",
        "--mysql-pwd {}",
        "--access_token_2 {}",
        "--apikeys {}",
        "--secretkey {}",
        "--kw=token={}",
    ),
    *(
        "bash -c 'x.py \\\n  --api-key \\\n  {}'",
        "bash -c 'x.py --password \"two {}\" --auth {}'",
        "bash -c \"x.py --password 'two {}' --lr 1\"",
        'bash -c \'x.py --password "a\\" {}"\'',
        "bash -c 'x.py \"--hf-token\" {} --token -{}'",
        'bash -c \'bash -c "x.py --run \\"y.py --token {}\\""\'',
    ),
    *(
        'python -c \'os.environ["A_KEY"] = "{}"\'',
        'python -c \'os.environ.setdefault("A_KEY", "{}")\'',
        "--config '{{a: 1, hf_token: {}}}'",
        "--config '{{a:{{hf_token:{}}}}}'",
    ),
)


@pytest.mark.parametrize("form", COMMANDS)
def test_no_form_of_a_command_keeps_its_secret(form: str) -> None:
    words = shlex.split(
        form.replace("{}{}", 2 * SECRET.replace("-", ""))
        .replace("{}", SECRET)
        .replace("{{", "{")
        .replace("}}", "}")
    )
    hidden = tokens.hide_words(["my.py", *words, "--lr", "0.1"], ENV)
    assert "pLum" not in " ".join(hidden)
    assert "<secret>" in " ".join(hidden)
    assert (hidden[0], hidden[-2:]) == ("my.py", ["--lr", "0.1"])
    assert tokens.hide_words(hidden, ENV) == hidden


PLAIN = (
    "train.py config/train_gpt2.py --batch_size=32 --compile=False --init_from=gpt2-xl --device=cpu",  # nanoGPT
    "train.py /data/imagenet --model vit_base_patch16_224 --pretrained-path /w@2/x.bin --class-map a.txt --amp -j 8 -p 8",
    "train.py --input-key jpg --target-key cls --mixup 0.8 --aa rand-m9-mstd0.5-inc1 --opt adamw --num-classes 10",
    "run_clm.py --tokenizer_name gpt2 --model_name_or_path gpt2 --use_auth_token True --push_to_hub --fp16 --block_size 1024",
    "run_glue.py --max_seq_length 128 --token False --pad_token <pad> --eos-token </s> --text_key content --model_revision main",
    "sft.py --dataset_text_field text --max_new_tokens 256 --max_tokens=4096 --num-tokens 1024 --per_token_loss",
    "main.py fit --trainer.devices 8 --trainer.max_epochs=3 --data.init_args.key_dim 64 --model.token_dropout 0.1",
    "ds.py --deepspeed --deepspeed_config ds_config.json --local_rank -1 --zero-stage 3 --hostfile /job/hostfile",
    "train.py +experiment=vit optimizer.token_lr=1e-4 model.head.key_proj=true data=imagenet@small trainer.max_steps=10 ~logger",
    "train.py hydra.run.dir=/out/${now:%Y-%m-%d} model.mask_token=learned model.cls_token=true hydra/launcher=basic",
    "main.py -a resnet50 --dist-url tcp://127.0.0.1:29500 --dist-backend nccl --multiprocessing-distributed /data",
    "x.py --header-size 80 --pass-through --cookie-cutter x --auth none --key 64 --token-level --n-pass 2 --keys a,b",
    "x.py --password-file /run/pw --token_file=/run/t --secret-name s3 --key-value --monkey banana --hotkey=ctrl",
    "x.py --compass north --bypass x --author me --authors=a,b --patience 5 --pathology yes --signature serving_default",
    "x.py --revision 0123456789012345678901234567890123456789 --wandb-mode offline user@host:/x /a@b/c s3://bucket/key=1/",
    "-m train --config digits-short steps=10 data.path=/data seed=1",
    'bash -c "cd /x && python y.py --lr 0.1"',
    "bash -c 'x.py --auth --key -v --run \"y.py --lr 1\" --token && z.py --format {key:>9} --map {key: a, b: c}'",
    "x.py --train-tokens 300000000000 --tokens 300B --columns text:str,key:string --schema {image_key: picture}",
)


@pytest.mark.parametrize("command", PLAIN)
def test_the_arguments_of_ordinary_programs_stay(command: str) -> None:
    words = shlex.split(command)
    assert tokens.hide_words(words, ENV) == words


def test_the_word_behind_an_option_that_names_a_secret_is_hidden() -> None:
    words = ["train.py", "--hub-token", "anything", "--lr", "0.1", "--password", "--fast"]
    hidden = ["train.py", "--hub-token", "<secret>", "--lr", "0.1", "--password", "--fast"]
    assert tokens.hide_words(words, ENV) == hidden


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("HF_TOKEN", True),
        ("hubToken2", True),
        ("--api-key", True),
        ("db.password", True),
        ("PWD", False),
        ("APPTRAIN_PASS", False),
        ("forward_pass", False),
        ("max_tokens", False),
        ("", False),
        ("__", False),
        ("12", False),
        ("token_file", False),
    ],
)
def test_a_name_tells_whether_it_holds_a_secret(name: str, holds: bool) -> None:
    assert tokens.names_secret(name) == holds


@pytest.mark.parametrize(
    ("env", "hidden"),
    [
        ({"HF_TOKEN": "abcdef"}, "x <secret HF_TOKEN> y"),
        ({"HF_TOKEN": "abcde"}, "x abcdef y"),
        ({"HF_TOKEN": ""}, "x abcdef y"),
        ({"OTHER": "abcdef"}, "x abcdef y"),
        ({"HF_TOKEN": "abcdef", "API_KEY": "x abcdef"}, "<secret API_KEY> y"),
    ],
)
def test_the_value_of_a_variable_that_holds_a_secret_is_named(env: dict[str, str], hidden: str) -> None:
    assert tokens.hide("x abcdef y", env) == hidden


def test_values_are_hidden_by_their_keys_too() -> None:
    found = tokens.hide_values(
        {"a": {"token": "x", "list": ["hf_abcdefghijklmnopqrstuvwxyz", 7]}, "lr": 0.1}, ENV
    )
    assert found == {"a": {"token": "<secret>", "list": ["<secret>", 7]}, "lr": 0.1}


WITH_SECRETS = (
    *(
        "+token = 'abcdefghijk'",
        "+API_KEY=abcdefghijk",
        "+x = hf_abcdefghijklmnopqrstuvwxyz",
        "+0123456789abcdef",
        'DB_PASS = "x"',
    ),
    *(
        'pwd = "x"',
        "passphrase = 'x'",
        "token = '''x'''",
        'token = """x"""',
        "# password: x",
        "# password=x",
        "// token: x",
    ),
    *(
        "# WANDB_API_KEY=x",
        '"Bearer x"',
        'wandb.login("' + 4 * "0123456789" + '")',
        "wandb.login(key='abcdefgh')",
    ),
    *(
        "https://hooks.slack.com/services/T0/B0/x",
        "get('https://h/x?sig=x')",
        "https://u:x@h/",
        "'Authorization': 'x'",
    ),
    *(
        "password: hunter",
        "  token: abc",
        "export DB_PASS=x",
        "ENV HF_TOKEN=x",
        '"api_key": "x"',
        "apiKey: 'x'",
        "PASSWORD = r'x'",
    ),
    *(
        "key = '" + 8 * "89abcdef" + "'",
        "-----BEGIN RSA PRIVATE KEY-----",
        "login(password='x')",
        "sk_live_0123456789abcdefgh",
    ),
    *(
        'os.environ["COMET_API_KEY"] = "x"',
        "cfg['password']='x'",
        'os.environ.setdefault("A_TOKEN", "x")',
        "monkeypatch.setenv('A_TOKEN', 'x')",
        "password=hunter22",
        "export comet_api_key=x",
        "api_key = Xk29dLqPzR77",
        "    api_key = Xk29dLqPzR77",
        "srun x.py --api-key Xk29dLqPzR77",
        'srun x.py --api-key "Xk29dLqPzR77"',
        'bash -c "export HF_TOKEN=Xk29dLqPzR77; python x.py"',
        "env WANDB_API_KEY=Xk29dLqPzR77 python x.py",
        "x.py --config '{lr: 1, api_key: Xk29dLqPzR77}'",
        "model: {hub: {token:Xk29dLqPzR77}, lr: 1}",
        "# TODO: token=abcd",
        "x = 1  # note: password=hunter22",
    ),
)


@pytest.mark.parametrize("text", WITH_SECRETS)
def test_program_text_with_a_secret_is_known(text: str) -> None:
    assert tokens.found_in(f"--- a\n+++ b\n+{text.removeprefix('+')}\n", ENV)
    assert tokens.found_in(f"index 0123456..89abcde 100644\n {text.removeprefix('+')}\n", ENV)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "+token = read(path)",
            "+key = lambda pair: pair[0]",
            "+API_KEY=$OTHER_KEY",
            "+def login(token: str) -> None:",
        ),
        *(
            "+    password: str",
            "+lr = 0.1  # a note",
            "+tokenizer = load('gpt2')",
            "+for key in keys:",
            "+pad_token = '<pad>'",
        ),
        *(
            "+# the key is a pair",
            "-Subproject commit 0123456789012345678901234567890123456789",
            "+    return self.token",
            "+image_key = 'jpg'",
            "+token = os.environ['HF_TOKEN']",
        ),
        *(
            "+token = self.token2_of_1",
            "+    token=token,",
            "+    key=key_of_2",
            "+    api_key=API_KEY_2024_1,",
            "+password = second_password",
            "+token = Llama3Tokenizer2.load(path)",
        ),
        *(
            "+for name in ('query', 'key', 'value'):",
            "+token = config['token']",
            "+if row['key'] == 'a':",
            "+cfg['image_key'] = 'jpg'",
            "+set(name, 'token')",
            "+ids = {token: index for index, token in enumerate(words)}",
            "+sizes = {key: lengths_of_1_and_2, token: Llama3Tokenizer2(path)}",
            "+model: {key: image_of_1, token: ${oc.env:HF_TOKEN_1_OF_2}}",
            "+srun train.py --token $HF_TOKEN --key image_of_1",
            "+    parser.add_argument('--token', default=None, help='pass --token to log in')",
        ),
    ],
)
def test_program_text_without_one_is_kept(text: str) -> None:
    head = "diff --git a/x.py b/x.py\nindex 0123456789012345678901234567890123456789..89abcde 100644\n--- a/x.py\n+++ b/x.py\n"
    assert not tokens.found_in(f"{head}{text}\n", ENV)


KEY = "\n".join(
    ["-----BEGIN PRIVATE KEY-----", *["[rank-0]: MII" + "a" * 60] * 20, "-----END PRIVATE KEY-----"]
)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (f"before {KEY} after", "before <secret> after"),
        (f"{'b' * 64}\n-----END PRIVATE KEY-----\nafter", "<secret>\nafter"),
        (f"before\n-----BEGIN PRIVATE KEY-----\n{'b' * 64}\n{'c' * 64}", "before\n<secret>"),
    ],
    ids=["with a mark before each line", "without its begin", "without its end"],
)
def test_a_private_key_in_a_log_is_hidden_over_its_lines(text: str, hidden: str) -> None:
    assert tokens.hide(text, {}) == hidden


@pytest.mark.parametrize(
    "unit",
    ["a", "x-", "eyJ", "a.", ":", ".-a", "--a 'b ", '--a "', "a=", "{a:", "-----BEGIN PRIVATE KEY-----"],
)
def test_one_endless_word_takes_no_time_that_grows_with_its_square(unit: str) -> None:
    """It would take minutes, and this test its bound."""
    tokens.hide(unit * (400_000 // len(unit)), {"A_TOKEN": "abcdefgh"})


def test_what_is_all_marks_of_comments_or_empty_lines_takes_no_time() -> None:
    """Of 1 MiB, as a diff may have: it would take hours if each mark looked at all that follows."""
    for text in (
        '"##ing": 5, ' * 87_000,
        "1;2;" * 260_000,
        "-" * (1 << 20),
        "//a=" * 260_000,
        "# a:" * 260_000,
        *(
            "(" + unit * ((1 << 20) // len(unit))
            for unit in ("a=", "1=", "a1=", "key=", "key=a1b2.", "{key:", "{key: a}")
        ),
    ):
        assert tokens.found_in(text, {}) is False
    for unit in (
        "\n",
        " \n",
        "+\n",
        "+ export \n",
        "--a \\\n",
        "setenv('a', ",
        '["a"]',
    ):  # the empty lines around a change, if git shows them all
        assert tokens.found_in(unit * ((1 << 20) // len(unit)), {}) is False
    assert tokens.found_in(f"{'x' * 1000}; # a=1; api_key: {SECRET}", {})
