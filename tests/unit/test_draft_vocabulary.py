"""Draft ids that are not the target's."""

import pytest
import torch

from fly.models.draft_vocabulary import NONE, DraftVocabulary


def test_offsets_are_added_to_the_draft_id():
    vocabulary = DraftVocabulary.from_offsets(torch.tensor([1, 2, 2]), target_size=6)
    assert vocabulary.to_target_D.tolist() == [1, 3, 4]
    assert vocabulary.to_draft_V.tolist() == [NONE, 0, NONE, 1, 2, NONE]
    assert vocabulary.share == 0.5


def test_probabilities_go_to_the_targets_ids_and_nowhere_else():
    vocabulary = DraftVocabulary(torch.tensor([4, NONE, 0]), target_size=5)
    logits_ND = torch.tensor([[1.0, 9.0, 2.0], [0.0, 3.0, -1.0]])
    q_NV = torch.softmax(vocabulary.spread_logits(logits_ND), dim=-1)
    assert q_NV.shape == (2, 5)
    torch.testing.assert_close(q_NV.sum(dim=-1), torch.ones(2))
    assert q_NV[:, [1, 2, 3]].eq(0).all()
    torch.testing.assert_close(q_NV[0, 4] / q_NV[0, 0], torch.tensor(1.0).exp().reciprocal())


@pytest.mark.parametrize("ids", [[0, 5], [0, -2], [3, 3]])
def test_ids_that_no_target_has_or_two_tokens_share_are_refused(ids):
    with pytest.raises(ValueError, match="target id"):
        DraftVocabulary(torch.tensor(ids), target_size=5)
