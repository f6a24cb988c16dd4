"""From a model in memory to a bundle or folder: the low-level writers, and one file per framework, opened when used."""

from converters.bundle import read_bundle_weights as read_bundle_weights
from converters.exporters.bundle_writer import write_bundle as write_bundle
from converters.exporters.client_side import ClientSide as ClientSide
from converters.exporters.description import Description as Description
from converters.exporters.description import Exported as Exported
from converters.exporters.jax_functions import JaxModel as JaxModel
from converters.exporters.jax_functions import export_jax as export_jax
from converters.exporters.onnx_graphs import OnnxModel as OnnxModel
from converters.exporters.onnx_graphs import export_onnx as export_onnx
from converters.exporters.sklearn_models import SklearnModel as SklearnModel
from converters.exporters.sklearn_models import export_sklearn as export_sklearn
from converters.exporters.torch_modules import TorchModel as TorchModel
from converters.exporters.torch_modules import export_torch as export_torch
from converters.exporters.transformers_models import TransformersModel as TransformersModel
from converters.exporters.transformers_models import export_transformers as export_transformers
from converters.exporters.xgboost_models import XgboostModel as XgboostModel
from converters.exporters.xgboost_models import export_xgboost as export_xgboost
from nereid_backend.spec import TensorSpec as TensorSpec
