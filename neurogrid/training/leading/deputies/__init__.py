"""A leader's deputies: who has a copy of the journal, and leads when the leader is dead.

copying       the leader's side: the deputy gets the journal line by line
copied_files  what it has besides
deputy        its own side: it copies, and leads when its leader is dead
"""

from neurogrid.training.leading.deputies.copied_files import OfferedCopies
from neurogrid.training.leading.deputies.copying import Copying, DeposedError

__all__ = ["Copying", "DeposedError", "OfferedCopies"]
