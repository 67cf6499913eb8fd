"""Figures of estimates: what they show (layers, step, sweep), and the forms they take (text, matplotlib, HTML)."""
