"""Private estimators for scikit-learn: `PrivateClassifier` and `PrivateRegressor`.

Formal guarantee. `fit` releases `coef_` and `intercept_`, which are (ε, δ)-DP for adding or removing one row
of (X, y). Everything else that a fitted estimator holds follows from them, from its parameters and from what
scikit-learn's interface makes public: the number of rows and columns, the names of columns, and the set of
classes where `classes` is not given.
"""

from collections.abc import Sequence
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from gredp.engine import PrivacyEngine
from gredp.errors import GredpError
from gredp.guarantee import Guarantee
from gredp.sampling import BatchMemoryManager

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise GredpError("gredp.sklearn needs scikit-learn 1.6 or later: pip install 'gredp[sklearn]'") from error

Array = NDArray[Any]
#: rows in memory at once while training
PHYSICAL_BATCH = 4096


# scikit-learn reads the parameters of an estimator from its own __init__, so each class spells them out.
class _PrivateLinear(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A linear model, trained by private gradient descent from zero; the later half of the steps is averaged.

    The defaults did best, or within noise of the best, over four public tables and ε from 0.5 to 2.
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        bounds: Sequence[ArrayLike] | None = None,
        steps: int = 30,
        learning_rate: float = 1.0,
        clip_norm: float = 1.0,
        l2: float = 0.0,
        accountant: str = "pld",
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.steps = steps
        self.learning_rate = learning_rate
        self.clip_norm = clip_norm
        self.l2 = l2
        self.accountant = accountant

    guarantee_: Guarantee
    coef_: Array
    intercept_: Array

    def _scaled(self, x: Array) -> Tensor:
        """Columns clipped to `bounds` and scaled to [−1, 1]; as they are without bounds."""
        if self.bounds is None:
            return torch.as_tensor(np.asarray(x, dtype=np.float32))
        try:
            low, high = (np.broadcast_to(np.asarray(end, float), x.shape[1:]) for end in self.bounds)
        except ValueError:
            raise GredpError(
                f"bounds must be (low, high), each a number or one number for each of {x.shape[1]} columns"
            ) from None
        if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
            raise GredpError("bounds must be finite, with low below high in every column")
        scaled = 2 * (np.clip(x, low, high) - low) / (high - low) - 1
        return torch.as_tensor(scaled.astype(np.float32))

    def _fit(self, x: Array, target: Tensor, outputs: int, loss: Any) -> None:
        records = TensorDataset(self._scaled(x), target)
        model: nn.Module = nn.Linear(x.shape[1], outputs)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        averaged = AveragedModel(model)
        engine = PrivacyEngine(accountant=self.accountant)
        optimizer: Any = torch.optim.SGD(
            model.parameters(), self.learning_rate / self.clip_norm, momentum=0.9, weight_decay=self.l2
        )
        try:
            model, optimizer, loader = engine.make_private_with_epsilon(
                module=model,
                optimizer=optimizer,
                data_loader=DataLoader(records, batch_size=len(records)),
                target_epsilon=self.epsilon,
                target_delta=self.delta,
                epochs=self.steps,
                max_grad_norm=self.clip_norm,
                clipping="automatic",
            )
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=PHYSICAL_BATCH, optimizer=optimizer
            ) as parts:
                for step in range(self.steps):
                    for inputs, wanted in parts:
                        optimizer.zero_grad()
                        loss(model(inputs), wanted).backward()
                        optimizer.step()
                    if 2 * step >= self.steps:
                        averaged.update_parameters(model)
            self.guarantee_ = engine.guarantee(self.delta)
        finally:
            engine.detach()
        released = averaged.module.state_dict()
        self.coef_ = released["weight"].double().numpy()
        self.intercept_ = released["bias"].double().numpy()
        self.n_iter_ = self.steps

    def _outputs(self, x: ArrayLike) -> Array:
        check_is_fitted(self)
        checked = validate_data(self, x, reset=False)
        scores: Array = self._scaled(checked).double().numpy() @ self.coef_.T + self.intercept_
        return scores


class PrivateClassifier(ClassifierMixin, _PrivateLinear):  # type: ignore[misc]
    """Multinomial logistic regression under (ε, δ)-differential privacy.

    | parameter | meaning | default |
    |---|---|---|
    | `epsilon`, `delta` | the budget of one `fit`; a second `fit` spends it again | 1.0, 1e-5 |
    | `bounds` | (low, high) of the columns, numbers or arrays, known without the data; values outside are clipped, and [low, high] becomes [−1, 1]. None: X as it is, which should then be of about that size | None |
    | `classes` | the labels that may occur; None takes those in `y` and so publishes which occur | None |
    | `steps` | gradient steps, each on all rows | 30 |
    | `learning_rate` | in units of the clipped gradient | 1.0 |
    | `clip_norm` | to which each row's gradient is scaled | 1.0 |
    | `l2` | weight decay | 0 |
    | `accountant` | "pld" or "rdp" | "pld" |

    Bounds or a scaler fitted on the private rows (`StandardScaler`, `MinMaxScaler`) publish statistics that ε
    does not cover: state bounds instead.

    After `fit`: `classes_`, `coef_`, `intercept_`, `n_features_in_`, and `guarantee_`, the proven ε.

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = PrivateClassifier(epsilon=8, bounds=(0, X.max(0)), classes=(0, 1)).fit(X, y)
    >>> model.score(X, y) > 0.85
    True
    >>> model.guarantee_.proven_epsilon <= 8
    True
    """  # noqa: E501

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        bounds: Sequence[ArrayLike] | None = None,
        classes: Sequence[Any] | None = None,
        steps: int = 30,
        learning_rate: float = 1.0,
        clip_norm: float = 1.0,
        l2: float = 0.0,
        accountant: str = "pld",
    ) -> None:
        super().__init__(
            epsilon,
            delta,
            bounds=bounds,
            steps=steps,
            learning_rate=learning_rate,
            clip_norm=clip_norm,
            l2=l2,
            accountant=accountant,
        )
        self.classes = classes

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Spend the budget on the rows of `X` and their labels `y`."""
        rows, labels = validate_data(self, X, y)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels if self.classes is None else np.asarray(self.classes))
        if len(self.classes_) < 2:
            raise ValueError("PrivateClassifier needs at least two classes; y has 1 class")
        places = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if (self.classes_[places] != labels).any():
            raise GredpError("y holds a label that is not in `classes`: add it there, or drop its rows")
        self._fit(rows, torch.as_tensor(places), len(self.classes_), F.cross_entropy)
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """Logits `[n, classes]`; of two classes, the second's minus the first's `[n]`."""
        logits = self._outputs(X)
        return logits if logits.shape[1] > 2 else logits[:, 1] - logits[:, 0]

    def predict_proba(self, X: ArrayLike) -> Array:
        """`[n, classes]`, in the order of `classes_`."""
        return np.asarray(torch.as_tensor(self._outputs(X)).softmax(1))

    def predict(self, X: ArrayLike) -> Array:
        """`[n]` of `classes_`."""
        best = self._outputs(X).argmax(1)
        return cast(Array, self.classes_[best])


class PrivateRegressor(RegressorMixin, _PrivateLinear):  # type: ignore[misc]
    """Linear least squares under (ε, δ)-differential privacy, for targets of a declared range.

    Parameters as of `PrivateClassifier`, without `classes`, and with `target_range` = (low, high), which must
    be known without the data: targets outside are clipped to it, and predictions lie within.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (2000, 3))
    >>> y = 20 + 5 * X @ [1, 2, 0]
    >>> model = PrivateRegressor(epsilon=4, target_range=(0, 40)).fit(X, y)
    >>> model.score(X, y) > 0.5
    True
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        target_range: tuple[float, float] = (-1.0, 1.0),
        bounds: Sequence[ArrayLike] | None = None,
        steps: int = 30,
        learning_rate: float = 0.3,
        clip_norm: float = 1.0,
        l2: float = 0.0,
        accountant: str = "pld",
    ) -> None:
        super().__init__(
            epsilon,
            delta,
            bounds=bounds,
            steps=steps,
            learning_rate=learning_rate,
            clip_norm=clip_norm,
            l2=l2,
            accountant=accountant,
        )
        self.target_range = target_range

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Spend the budget on the rows of `X` and their targets `y`."""
        rows, targets = validate_data(self, X, y, y_numeric=True)
        low, high = self.target_range
        if not (np.isfinite([low, high]).all() and low < high):
            raise GredpError(f"target_range must be (low, high) with low below high, not {self.target_range}")
        scaled = 2 * (np.clip(targets, low, high) - low) / (high - low) - 1
        target = torch.as_tensor(scaled.astype(np.float32))[:, None]
        self._fit(rows, target, 1, F.mse_loss)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """`[n]` in `target_range`."""
        scaled = self._outputs(X)[:, 0].clip(-1, 1)
        low, high = self.target_range
        return cast(Array, low + (high - low) * (scaled + 1) / 2)
