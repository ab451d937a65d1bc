"""train.py with a reward that an untrained model gets half of the time: right if its text has an
even number of characters. So a run of seconds has groups with signal, updates and new weights."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import rollout
import train

if __name__ == "__main__":
    rollout.extract_answer = lambda text: str(len(text))
    rollout.integer_verdict = lambda answer, gold: int(answer) % 2 == 0
    train.main()
