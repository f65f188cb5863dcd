"""What a check found: PASS, WARN, FAIL, or SKIP when it could not be made here."""

from dataclasses import dataclass

PASS, WARN, FAIL, SKIP = "PASS", "WARN", "FAIL", "SKIP"
_COLOUR = {PASS: "32", WARN: "33", FAIL: "31", SKIP: "2"}


@dataclass(frozen=True)
class Finding:
    """The result of one check. WARN and FAIL say in `remedy` what to do."""

    group: str
    check: str
    status: str
    detail: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status in (WARN, FAIL) and not self.remedy:
            raise ValueError(f"{self.group}, {self.check}: a {self.status} without a remedy")

    def text(self, colour: bool = False) -> str:
        """One line, and one more with the remedy."""
        status = f"\033[{_COLOUR[self.status]}m{self.status}\033[0m" if colour else self.status
        line = f"{status}  {self.group:11}  {self.check}: {self.detail}"
        return f"{line}\n      {'':11}  -> {self.remedy}" if self.remedy else line


def split_remedy(message: str) -> tuple[str, str]:
    """(detail, remedy) of an error whose first sentence says what is wrong and whose others say what to do."""
    detail, _, remedy = message.partition(". ")
    return detail, remedy or "Correct it and run verify.sh again."
