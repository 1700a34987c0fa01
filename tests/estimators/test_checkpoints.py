"""States of long computations: a run that an error interrupts resumes with the numbers of an uninterrupted one."""

import json
import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from estimators.matrices import Wrapped, linspace_spectrum, symmetric

from hodiff import ConvergenceError, HessianOperator, HodiffWarning, InputError
from hodiff.estimators import Checkpoint, eigsh, solve, spectral_density
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.spectra.lanczos import Chain

D = torch.float64
N = 200
# A cluster at the upper end takes several restarts of few vectors; its top eigenvalue is double.
HARD = symmetric(torch.cat([linspace_spectrum(N - 5, 0, 1), torch.tensor([1.01, 1.02, 1.03, 1.04, 1.04], dtype=D)]))
POSITIVE = symmetric(linspace_spectrum(N, 1e-4, 1))
B = torch.ones(N, 2, dtype=D) * torch.tensor([1.0, -3.0], dtype=D) + torch.eye(N, dtype=D)[:, :2]


class Interrupted(Wrapped):
    """Operator that raises at a product."""

    def __init__(self, matrix, last):
        super().__init__(matrix)
        self.last = last

    def __matmul__(self, v):
        if self.products >= self.last:
            raise KeyboardInterrupt
        return super().__matmul__(v)


LANCZOS = {"which": "LA", "method": "lanczos", "max_iterations": 2000}
RUNS = {
    "eigsh": (HARD, lambda A, **o: eigsh(A, 4, **LANCZOS, restart=20, **o)),
    "eigsh, twice": (
        (HARD - 1.019999 * torch.eye(N, dtype=D)).float(),
        lambda A, **o: eigsh(A, 4, which="LA", method="lanczos", restart=30, **o),
    ),
    "solve": (POSITIVE, lambda A, **o: solve(A, B, tol=1e-12, **o)),
    "solve from a start": (POSITIVE, lambda A, **o: solve(A, B[:, 0], x0=B[:, 1], **o)),
    "spectral_density": (HARD, lambda A, **o: spectral_density(A, samples=5, steps=30, chunk_size=2, **o)),
}


def numbers(result):
    names = (
        "value",
        "eigenvalues",
        "ritz_values",
        "weights",
        "short_ritz_values",
        "residual",
        "iterations",
        "converged",
    )
    return {name: torch.as_tensor(getattr(result, name), dtype=D) for name in names if hasattr(result, name)}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_an_interrupted_run_resumes_with_the_same_numbers(tmp_path, name, share):
    matrix, run = RUNS[name]
    whole = run(Wrapped(matrix))
    A = Interrupted(matrix, int(share * whole.products))
    with pytest.raises(KeyboardInterrupt):
        run(A, checkpoint=Checkpoint(tmp_path, every=7))
    again = Wrapped(matrix)
    resumed = run(again, checkpoint=Checkpoint(tmp_path, every=7))
    # Products since the last state, and a block and one product that compares the operators, are repeated.
    assert again.products <= whole.products - A.last + 7 + 40
    assert again.products < whole.products - A.last / 2 + 10
    tolerance = 1e-12 if matrix.dtype == D else 1e-5
    for key, truth in numbers(whole).items():
        torch.testing.assert_close(numbers(resumed)[key], truth, rtol=tolerance, atol=tolerance)
    assert resumed.products >= whole.products


def test_thick_restarts_find_what_all_vectors_find():
    truth = torch.linalg.eigvalsh(HARD)
    for which, expected in (("LA", truth[-4:]), ("SA", truth[:4]), ("LM", truth[-4:])):
        for restart in (6, 12, 30):
            found = eigsh(HARD, 4, **{**LANCZOS, "which": which}, restart=restart, tol=1e-9)
            torch.testing.assert_close(found.eigenvalues, expected, rtol=1e-8, atol=1e-8)
            basis = found.eigenvectors
            torch.testing.assert_close(basis.T @ basis, torch.eye(4, dtype=D), rtol=0, atol=1e-10)


def test_restarted_chain_keeps_its_vectors_orthonormal_and_its_matrix_right():
    view = view_of(HARD, "test")
    chain = Chain(view, torch.ones(N, dtype=D), 15)
    for _ in range(40):
        chain.extend(view.matmat(chain.newest[:, None])[:, 0])
        values, vectors = chain.ritz()
        projected = chain.basis @ HARD @ chain.basis.T
        rebuilt = torch.from_numpy((vectors * values) @ vectors.T)
        torch.testing.assert_close(rebuilt, projected, rtol=0, atol=1e-12)
        ritz = chain.combined(vectors)
        residuals = torch.linalg.vector_norm(HARD @ ritz - ritz * torch.from_numpy(values), dim=0)
        torch.testing.assert_close(torch.from_numpy(chain.residuals(vectors)), residuals, rtol=0, atol=1e-12)
        if chain.full:
            chain.shorten(values[-8:], vectors[:, -8:])
            assert len(chain) == 8
    assert chain.products == 40


def test_lanczos_keeps_as_many_vectors_as_restart_says(monkeypatch):
    sizes, create = [], Chain.__init__

    def noting(self, *args, **options):
        create(self, *args, **options)
        sizes.append(len(self._basis))

    monkeypatch.setattr(Chain, "__init__", noting)
    found = eigsh(HARD, 4, **LANCZOS, restart=20)
    assert found.iterations > 60
    assert set(sizes) == {20}


def test_a_later_state_replaces_an_earlier_one(tmp_path):
    matrix, run = RUNS["solve"]
    run(matrix, checkpoint=Checkpoint(tmp_path, every=10))
    record = json.loads((tmp_path / "state.json").read_text())
    assert sorted(each.name for each in tmp_path.iterdir()) == [record["vectors"], "state.json"]
    # A run that stops while it saves leaves other folders, and the last complete state counts.
    (tmp_path / "products-9999").mkdir()
    A = Wrapped(matrix)
    run(A, checkpoint=str(tmp_path))
    assert A.products < 30


def test_unfinished_runs_go_on_with_more_iterations(tmp_path):
    with pytest.raises(ConvergenceError):
        solve(POSITIVE, B, tol=1e-12, max_iterations=50, checkpoint=Checkpoint(tmp_path, every=10))
    A = Wrapped(POSITIVE)
    again = solve(A, B, tol=1e-12, checkpoint=tmp_path)
    torch.testing.assert_close(again.value, torch.linalg.solve(POSITIVE, B), rtol=1e-7, atol=1e-7)
    assert again.iterations > 50


def test_pytrees_resume(tmp_path):
    x = {"a": torch.ones(3, 4, dtype=D), "b": torch.arange(5.0, dtype=D)}
    A = HessianOperator(lambda p: (p["a"].sum() + p["b"].square().sum()).cosh() / 1e13 + p["b"].pow(4).sum(), x)
    b = {name: each + 1 for name, each in x.items()}
    truth = solve(A, b, damping=1.0, tol=1e-10)
    with pytest.raises(ConvergenceError):
        solve(A, b, damping=1.0, tol=1e-10, max_iterations=4, checkpoint=Checkpoint(tmp_path, every=1))
    found = solve(A, b, damping=1.0, tol=1e-10, checkpoint=tmp_path)
    for name, each in truth.value.items():
        torch.testing.assert_close(found.value[name], each, rtol=1e-8, atol=1e-8)


def test_states_of_other_runs_are_refused(tmp_path):
    solve(POSITIVE, B, checkpoint=Checkpoint(tmp_path / "solve", every=10))
    for A, b, options, message in (
        (POSITIVE, B, {"damping": 0.5}, "another damping: 0.5 instead of 0.0"),
        (POSITIVE, B, {"tol": 1e-3}, "another tol"),
        (POSITIVE, B + torch.eye(N, dtype=D)[:, 3:5], {}, "another b: another one instead of a vector"),
        (POSITIVE, B[:, :1], {}, "another b"),
        (1.001 * POSITIVE, B, {}, "A: expected the operator whose state is in .* differs by 0.001"),
        (POSITIVE.float(), B, {"tol": 1e-6}, "another dtype"),
    ):
        with pytest.raises(InputError, match=f"solve: checkpoint: .*{message}"):
            solve(A, b, checkpoint=tmp_path / "solve", **options)
    with pytest.raises(InputError, match="another caller: eigsh instead of solve"):
        eigsh(POSITIVE, 2, method="lanczos", checkpoint=tmp_path / "solve")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    with pytest.raises(InputError, match="eigsh: checkpoint: expected an empty folder, or all files of a state"):
        eigsh(POSITIVE, 2, method="lanczos", checkpoint=tmp_path / "broken")


def changed(file):
    """Change one number of a vector, by a millionth."""
    known = dcp.FileSystemReader(file.parent).read_metadata().state_dict_metadata
    leaves = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in known.items()}
    dcp.load(leaves, checkpoint_id=file.parent, no_dist=True)
    vector = next(each for name, each in leaves.items() if "probe" not in name)
    vector[0, 7] += 1e-6 * vector.norm()
    dcp.save(leaves, checkpoint_id=file.parent, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        changed,
        lambda file: file.unlink(),
        lambda file: shutil.rmtree(file.parent),
    ],
)
def test_damaged_states_are_refused(tmp_path, damage):
    solve(POSITIVE, B, checkpoint=Checkpoint(tmp_path, every=10))
    (file,) = tmp_path.glob("products-*/*.distcp")
    damage(file)
    with pytest.raises(
        InputError, match=r"expected an empty folder, or all files of a state .*, got (a changed|no) file products-"
    ):
        solve(POSITIVE, B, checkpoint=tmp_path)


@pytest.mark.slow
def test_every_changed_byte_is_refused_or_harmless(tmp_path):
    """Flipped bytes and truncations of all files; a byte between two words of JSON may change nothing."""
    truth = solve(POSITIVE, B, tol=1e-12)
    solve(POSITIVE, B, tol=1e-12, checkpoint=Checkpoint(tmp_path, every=10))
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert len(files) == 3
    draw = random.Random(0)
    for file in files:
        whole, refused = file.read_bytes(), 0
        for _ in range(60):
            place = draw.randrange(len(whole))
            flipped = whole[:place] + bytes([whole[place] ^ draw.randrange(1, 256)]) + whole[place + 1 :]
            file.write_bytes(draw.choice([flipped, whole[:place]]))
            try:
                found = solve(POSITIVE, B, tol=1e-12, checkpoint=tmp_path)
            except InputError as error:
                assert file.name in str(error)  # noqa: PT017 - the right numbers are allowed, too
                refused += 1
            else:
                assert torch.equal(found.value, truth.value)
        assert refused > 50
        file.write_bytes(whole)


def test_a_lost_state_starts_again_with_a_warning(tmp_path):
    solve(POSITIVE, B, checkpoint=Checkpoint(tmp_path, every=10))
    (tmp_path / "state.json").unlink()
    A = Wrapped(POSITIVE)
    with pytest.warns(HodiffWarning, match="solve: checkpoint: .* no state.json, so the run starts again"):
        solve(A, B, checkpoint=Checkpoint(tmp_path, every=10))
    assert A.products > 30
    assert (tmp_path / "state.json").exists()


def test_folders_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="solve: checkpoint: expected a folder in which every rank can write"):
        solve(POSITIVE, B, checkpoint=Checkpoint(tmp_path / "file", every=10))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda f: eigsh(POSITIVE, 2, method="arpack", checkpoint=f),
            "eigsh: checkpoint: expected None for method='arpack'",
        ),
        (
            lambda f: eigsh(POSITIVE, 2, method="arpack", restart=10),
            "eigsh: restart: expected None for method='arpack'",
        ),
        (lambda f: eigsh(POSITIVE, 6, method="lanczos", restart=7), "eigsh: restart: expected"),
        (lambda f: solve(POSITIVE, B, method="minres", checkpoint=f), "solve: checkpoint: expected None"),
        (lambda f: spectral_density(POSITIVE, method="exact", checkpoint=f), "checkpoint: expected None"),
        (lambda f: Checkpoint(f, every=0), "Checkpoint: every: expected"),
        (lambda f: Checkpoint(3), "Checkpoint: folder: expected a path, got int 3"),
    ],
)
def test_rejects_other_options(tmp_path, run, message):
    with pytest.raises(InputError, match=message):
        run(tmp_path)


def test_another_start_or_generator_is_refused(tmp_path):
    def seeded(seed):
        return torch.Generator().manual_seed(seed)

    folder = Checkpoint(tmp_path / "density", every=2)
    spectral_density(POSITIVE, samples=2, steps=5, generator=seeded(0), checkpoint=folder)
    with pytest.raises(InputError, match="got another generator"):
        spectral_density(POSITIVE, samples=2, steps=5, generator=seeded(1), checkpoint=tmp_path / "density")
    eigsh(POSITIVE, 2, checkpoint=Checkpoint(tmp_path / "eigsh", every=10))
    for options in ({"start": torch.ones(N, dtype=D)}, {"generator": seeded(1)}):
        with pytest.raises(InputError, match=r"got another (start|generator)"):
            eigsh(POSITIVE, 2, checkpoint=tmp_path / "eigsh", **options)
    solve(POSITIVE, B, checkpoint=Checkpoint(tmp_path / "solve", every=10))
    with pytest.raises(InputError, match="got another x0"):
        solve(POSITIVE, B, x0=B, checkpoint=tmp_path / "solve")
