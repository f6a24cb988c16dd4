"""Two stages: one model scores every place of the strip, another one classifies what is found there."""

import numpy as np

from nereid_backend.hooks import register_meta_model

SIZE = 8


def read_strip(inputs, call):
    strip = dict(inputs)["strip"]
    (scores,) = call("reader_find", {"strip": strip[np.newaxis]})
    columns = best_places(scores.array[0])
    if not columns:
        return {"digits": np.empty(0, np.int32), "columns": np.empty(0, np.int32)}
    crops = np.stack([strip[:, column : column + SIZE].ravel() for column in columns])
    (probabilities,) = call("reader_classify", {"pixels": crops})
    return {"digits": probabilities.array.argmax(1).astype(np.int32), "columns": np.int32(columns)}


def best_places(scores):
    """Columns with a positive score, the best first; places that would overlap by half are dropped."""
    places = []
    for column in np.argsort(-scores):
        if scores[column] > 0 and all(abs(column - other) > SIZE // 2 for other in places):
            places.append(int(column))
    return sorted(places)


register_meta_model(run=read_strip)
