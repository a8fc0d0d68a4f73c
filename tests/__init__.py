"""Tests of Fivefold. A package, so that workers can import cases by name."""
