"""The keys of a run's engine servers: who may sample, and who may also change weights, pause and abort.

They come from the environment (MEGARL_API_KEY and MEGARL_ADMIN_KEY), or are made anew in each life of the job. No
command line, config or record of the registry holds them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from megarl.errors import UserMistake

API, ADMIN = "MEGARL_API_KEY", "MEGARL_ADMIN_KEY"


@dataclass(frozen=True)
class Keys:
    """The keys of SGLang's servers; "" is none.

    Attributes:
        api: for sampling and for questions.
        admin: for everything that changes an engine; where there is none, `api` opens that as well.
    """

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Keys:
        """Those of the environment.

        Raises:
            UserMistake: one that cannot stand in a header, or an admin key alone.
        """
        for name in (API, ADMIN):
            if not re.fullmatch(r"[!-~]*", environ.get(name, "")):
                raise UserMistake("a key is printable ASCII without spaces", name, "for example: openssl rand -hex 16")
        found = cls(environ.get(API, ""), environ.get(ADMIN, ""))
        if found.admin and not found.api:
            raise UserMistake("without an API key everybody may sample", ADMIN, f"set {API} too, or neither")
        return found

    def __bool__(self) -> bool:
        return bool(self.api)

    @classmethod
    def generate(cls) -> Keys:
        """New ones."""
        return cls(secrets.token_hex(16), secrets.token_hex(16))

    def header(self, *, admin: bool) -> dict[str, str]:
        """The HTTP header that opens a call; {} without keys."""
        key = self.admin or self.api if admin else self.api
        return {"Authorization": f"Bearer {key}"} if key else {}

    def environment(self) -> dict[str, str]:
        """What `from_env` reads."""
        return {name: key for name, key in ((API, self.api), (ADMIN, self.admin)) if key}

    def to_text(self) -> str:
        """For handing them to another rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Keys:
        """What `to_text` wrote."""
        return cls(**json.loads(text))


NO_KEYS = Keys()
