"""Secrets in text: passwords, keys and tokens, known by their name or by their value's form."""

import re

# Names that end, or have a part that ends, with one of the words, but for those of files and of
# InfiniBand's partition keys (NCCL_IB_PKEY). TOKENIZERS_PARALLELISM is none.
NAME = (
    r"(?<!-)\b(\w{0,80}(?<!P)(?:KEY|TOKEN|SECRETS?|PASSW(?:OR)?D|PASSPHRASE|CREDENTIALS?)"
    r"(?:_(?!FILE|PATH|DIR)\w{1,80})?)"
)
# Most have a prefix of their own: the plugins of Yelp's detect-secrets 1.5 and what is newer. Each
# is bounded, so that no text takes more than linear time.
VALUES = (
    r"(?<=://)[^/@\s:]{1,100}:[^/@\s]{1,200}(?=@)",  # a password in an address
    r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY(?: BLOCK)?-----(?:\\n|[\w+/=\s])*",
    r"\bBearer\s+[\w.~+/=-]{16,}",
    r"\beyJ[\w-]{10,400}\.[\w-]{10,}[\w.-]*",  # JSON web token
    r"\b(?:hf_[A-Za-z0-9]{20,}|nvapi-[\w-]{60,})",
    r"\b(?:github_pat|gh[opsur])_\w{20,}",
    r"\bgl[a-z]{2,6}-[\w-]{20,}",  # GitLab
    r"\b[rs]k[-_](?=[\w-]{0,60}\d)[\w-]{20,}",  # model services, Stripe
    r"\bxox[a-z]-[\w-]{10,}|hooks\.slack\.com/services/[\w/]+",
    r"\b(?:AKIA|ASIA|A3T[A-Z0-9])[A-Z0-9]{16}",  # AWS
    r"\bAIza[\w-]{35}",  # Google
    r"\b(?:npm_|pypi-|SG\.|wandb_v\d_|sq0csp-)[\w.-]{30,}",
    r"\b(?:AC|SK)[0-9a-f]{32}\b|\b\d{8,10}:AA[\w-]{33}\b",  # Twilio, Telegram
)
VALUE = "|".join(VALUES)
# unless its value is read where the job runs
SECRET = re.compile(rf"""{NAME}=(?!["']?\$|["']?$)|{VALUE}""", re.IGNORECASE)
# what a variable gets, in a shell or in JSON; a word in small letters may be no secret
IN_TEXT = re.compile(rf"""{NAME}(=["']?|["']\s?:\s?["'])[^\s"',;$\\][^\s"',;\\]*|{VALUE}""")


def secret_in(text: str) -> str:
    """The name of the first secret in a text, or what it looks like; "" where there is none."""
    secret = SECRET.search(text)
    if secret is None:
        return ""
    if text.startswith("@", secret.end()):
        return "password in an address"
    return secret[1] or "token or key"


def masked(text: str) -> str:
    """The text with `(hidden)` in place of the value of each secret; JSON stays JSON."""
    return IN_TEXT.sub(r"\1\2(hidden)", text)
