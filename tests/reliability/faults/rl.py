from tests.reliability.faults import Fault

FAULTS: list[Fault] = []
