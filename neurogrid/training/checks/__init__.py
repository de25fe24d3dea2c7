"""Checks: how members of a run that do not trust each other find out who cheats.

Each member signs a claim of what it computed in a round. The seed of the next round draws who computes some of them
again. What does not hold becomes evidence, by which any third comes to the same verdict: the member has cheated, or who
accused it has.

    signed          bodies of fixed length, signed by an identity key
    claims          what a member says that it computed
    ledger          claims in turn: what fits, and what contradicts itself
    drawing         who looks at whose claim
    band            how far honest processors may be apart
    plausibility    what is odd beside others, and so looked at more often
    comparing       vectors compared
    measuring       what a result alone makes of the weights
    recomputing     claims made, computed again, and judged
    round_claims    the claims of a witnessed run, and who looks at which
    cases           accusations, and what those that judge them come to
    verdicts        why somebody was put out, or let in
    epoch_proofs    the epochs of a journal gone through again, with all that was signed
    evidence        findings, what accuses, and whom it is against

Source: protocol_spec/training/checks.md.
"""

from neurogrid.training.checks.band import Apart, Band, Sums, apart, measured_band
from neurogrid.training.checks.cases import Case, Verdict, Vote, vote_of
from neurogrid.training.checks.claims import (
    CLAIM_BYTES,
    Claim,
    Samples,
    Settings,
    open_claim,
    sign_claim,
)
from neurogrid.training.checks.comparing import cosines_of, figures_of, gradient_between, sums_of
from neurogrid.training.checks.drawing import (
    Audit,
    draw_audits,
    draw_measures,
    probability_of_detection,
    rounds_to_detection,
)
from neurogrid.training.checks.epoch_proofs import fault_of_epochs
from neurogrid.training.checks.evidence import (
    FINDING_BYTES,
    MAX_EVIDENCE_BYTES,
    Evidence,
    Finding,
    Kind,
    Named,
    liars,
    open_evidence,
    open_finding,
    pack_conflict,
    pack_evidence,
    sign_finding,
)
from neurogrid.training.checks.ledger import ClaimError, Conflict, Facts, Ledger, conflict_of
from neurogrid.training.checks.measuring import step_alone
from neurogrid.training.checks.plausibility import Figures, Thresholds, Watch, Worth, refusal
from neurogrid.training.checks.recomputing import (
    Audited,
    EvidenceError,
    Made,
    Material,
    MaterialError,
    Place,
    audit,
    check_evidence,
    make_claim,
    pack_plainly,
    result_id,
    start_of,
    vector_id,
)
from neurogrid.training.checks.round_claims import (
    ClaimConflictError,
    ClaimRules,
    RoundClaims,
    audits_of,
    claim_round,
    measures_of,
)
from neurogrid.training.checks.verdicts import open_proof, open_verdict, pack_proof, pack_verdict

__all__ = [
    "Case",
    "ClaimConflictError",
    "ClaimRules",
    "RoundClaims",
    "Verdict",
    "Vote",
    "audits_of",
    "claim_round",
    "vote_of",
    "open_verdict",
    "pack_verdict",
    "open_proof",
    "fault_of_epochs",
    "pack_proof",
    "Kind",
    # Claims
    "Claim",
    "Samples",
    "Settings",
    "Place",
    "Made",
    "make_claim",
    "sign_claim",
    "open_claim",
    "CLAIM_BYTES",
    "Facts",
    "Ledger",
    "ClaimError",
    "Conflict",
    "conflict_of",
    "start_of",
    "vector_id",
    "result_id",
    "pack_plainly",
    # Audits
    "Audit",
    "draw_audits",
    "probability_of_detection",
    "rounds_to_detection",
    "Material",
    "MaterialError",
    "Audited",
    "audit",
    "Band",
    "Apart",
    "Sums",
    "apart",
    "measured_band",
    "sums_of",
    "gradient_between",
    # Suspicion
    "Figures",
    "cosines_of",
    "figures_of",
    "Thresholds",
    "refusal",
    "Worth",
    "step_alone",
    "draw_measures",
    "measures_of",
    "Watch",
    # Evidence
    "Finding",
    "sign_finding",
    "open_finding",
    "FINDING_BYTES",
    "Evidence",
    "pack_conflict",
    "pack_evidence",
    "open_evidence",
    "MAX_EVIDENCE_BYTES",
    "check_evidence",
    "EvidenceError",
    "Named",
    "liars",
]
