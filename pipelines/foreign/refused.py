"""The error of this folder."""

from services.errors import ConfigError


class Refused(ConfigError):
    """An input of an import that cannot be served: its file, its row if any, the problem and the fix."""

    def __init__(self, file: str, row: str, problem: str, fix: str) -> None:
        where = f"{file}, {row}" if row else file
        super().__init__(f"{where}: {problem}; {fix}")
        self.file, self.row, self.problem, self.fix = file, row, problem, fix
