"""`gredp.sklearn`: scikit-learn's own checks, pipelines, declared bounds and what is refused."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from gredp import GredpError
from gredp.sklearn import PrivateClassifier, PrivateRegressor

#: each fits twice and compares: private noise is drawn anew in every fit and cannot be seeded
NEED_REPEATABLE_NOISE = {
    "check_fit_idempotent": "compares two fits on the same rows",
    "check_supervised_y_2d": "compares a fit on y [n] with one on y [n, 1]",
    "check_classifier_data_not_an_array": "compares a fit on an array with one on an array-like",
    "check_regressor_data_not_an_array": "compares a fit on an array with one on an array-like",
    "check_regressors_int": "compares a fit on whole numbers with one on the same as floats",
}


@parametrize_with_checks(
    [PrivateClassifier(epsilon=50, steps=20)],
    expected_failed_checks=lambda estimator: NEED_REPEATABLE_NOISE,
)
def test_scikit_learn_takes_the_classifier_for_one_of_its_own(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [PrivateRegressor(epsilon=50, target_range=(-4, 4))],
    expected_failed_checks=lambda estimator: NEED_REPEATABLE_NOISE,
)
def test_scikit_learn_takes_the_regressor_for_one_of_its_own(estimator, check):
    check(estimator)


def test_it_works_in_a_pipeline_and_in_a_search():
    x, y = load_breast_cancer(return_X_y=True)
    model = PrivateClassifier(epsilon=8, bounds=(0, np.log1p(x.max(0))), classes=(0, 1))
    pipeline = make_pipeline(FunctionTransformer(np.log1p), model)
    search = GridSearchCV(pipeline, {"privateclassifier__steps": [10, 20]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.8
    assert search.best_estimator_[-1].guarantee_.proven_epsilon <= 8


def test_probabilities_follow_the_order_of_the_classes():
    x, y = load_breast_cancer(return_X_y=True)
    names = np.array(["sick", "well"])[y]
    model = PrivateClassifier(epsilon=8, bounds=(0, x.max(0)), classes=("well", "sick")).fit(x, names)
    assert list(model.classes_) == ["sick", "well"]
    probabilities = model.predict_proba(x)
    assert np.allclose(probabilities.sum(1), 1)
    assert (model.classes_[probabilities.argmax(1)] == model.predict(x)).all()


def test_the_regressor_stays_in_its_range_and_learns():
    x, y = load_diabetes(return_X_y=True)
    model = PrivateRegressor(epsilon=20, target_range=(0, 350), bounds=(-0.2, 0.2)).fit(x, y)
    assert model.score(x, y) > 0.25
    assert ((model.predict(x * 100) >= 0) & (model.predict(x * 100) <= 350)).all()


def test_epsilon_covers_the_whole_fit():
    x, y = load_breast_cancer(return_X_y=True)
    model = PrivateClassifier(epsilon=1, bounds=(0, x.max(0))).fit(x, y)
    assert 0.9 < model.guarantee_.proven_epsilon <= 1
    assert model.guarantee_.steps == model.n_iter_ == 30


def test_values_outside_the_bounds_count_as_the_bounds():
    x = np.array([[0.0, 5.0], [10.0, -99.0], [99.0, 0.0]])
    model = PrivateClassifier(bounds=(0, [10, 20]))
    assert model._scaled(x).tolist() == [[-1, -0.5], [1, -1], [1, -1]]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (PrivateClassifier(classes=(0, 2)), "not in `classes`"),
        (PrivateClassifier(bounds=(0, [1, 2, 3])), "one number for each of 2 columns"),
        (PrivateClassifier(bounds=(1, 1)), "low below high"),
        (PrivateClassifier(epsilon=-1), "epsilon|ε"),
        (PrivateClassifier(delta=0.5), "δ"),
        (PrivateRegressor(target_range=(1, 0)), "low below high"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(model, says):
    x, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2
    with pytest.raises(GredpError, match=says) as refused:
        clone(model).fit(x, y)
    assert "\n" not in str(refused.value)
