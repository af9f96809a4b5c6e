"""The papers that recipes and parts cite: one key, title and arXiv number each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A cited paper. `key`: how code and pages cite it; `arxiv`: its arXiv number."""

    key: str
    authors: str
    year: int
    title: str
    arxiv: str

    @property
    def citation(self) -> str:
        """Return authors, year, title and arXiv number in one line."""
        return f"{self.authors} {self.year}, {self.title}, arXiv:{self.arxiv}"


PAPERS = {
    paper.key: paper
    for paper in (
        Paper(
            "MQA",
            "Shazeer",
            2019,
            "Fast Transformer Decoding: One Write-Head is All You Need",
            "1911.02150",
        ),
        Paper(
            "GQA",
            "Ainslie et al.",
            2023,
            "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
            "2305.13245",
        ),
        Paper(
            "DHA",
            "Chen et al.",
            2024,
            (
                "DHA: Learning Decoupled-Head Attention from Transformer Checkpoints via "
                "Adaptive Heads Fusion"
            ),
            "2406.06567",
        ),
        Paper(
            "AsymGQA",
            "Chen et al.",
            2024,
            "Optimised Grouped-Query Attention Mechanism for Transformers",
            "2406.14963",
        ),
        Paper(
            "Align",
            "Jin et al.",
            2024,
            "Align Attention Heads Before Merging Them: An Effective Way for Converting MHA to GQA",
            "2412.20677",
        ),
        Paper(
            "DirectShare",
            "Cao et al.",
            2024,
            "Head-wise Shareable Attention for Large Language Models",
            "2402.11819",
        ),
        Paper(
            "DCMHA",
            "Xiao et al.",
            2024,
            "Improving Transformers with Dynamically Composable Multi-Head Attention",
            "2405.08553",
        ),
    )
}
