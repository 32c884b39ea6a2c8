# SPDX-License-Identifier: Apache-2.0
"""Models of one op, for the runtimes whose kernels `jaxquant._runtime` computes."""

import tempfile

import numpy as np

UNSIGNED = np.uint8


# ONNX Runtime


def onnx_op(op, inputs, constants, order, domain="", **attributes):
    """The result of one op of ONNX Runtime on one thread; `order` names the inputs of the op."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    dtype = lambda v: helper.np_dtype_to_tensor_dtype(v.dtype)
    graph = helper.make_graph(
        [helper.make_node(op, order, ["y"], domain=domain, **attributes)],
        "g",
        [helper.make_tensor_value_info(k, dtype(v), v.shape) for k, v in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    graph.output[0].type.tensor_type.elem_type = dtype(next(iter(inputs.values())))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.x64quantprecision", "1")  # else products saturate without VNNI
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)[0]


def run_onnx(model, *args, optimized=True, outputs=None, is_exact=True, entries=()):
    """The results of a model in ONNX Runtime, and the ops of the graph that it ran."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    if is_exact:  # else products saturate without VNNI
        options.add_session_config_entry("session.x64quantprecision", "1")
    for name, value in entries:
        options.add_session_config_entry(name, value)
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = f"{folder}/optimized.onnx"
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [v.name for v in session.get_inputs()]
        results = session.run(outputs, dict(zip(names, map(np.asarray, args), strict=True)))
        ops = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    return results if outputs else results[0], ops


# LiteRT


def kernels():
    """The arguments of an interpreter for each kind of kernels."""
    from ai_edge_litert.interpreter import OpResolverType

    return {"litert": {}, "litert_reference": {"experimental_op_resolver_type": OpResolverType.BUILTIN_REF}}


class Tensor:
    """A tensor of a LiteRT model: with data a constant, with a scale quantized along `axis`."""

    def __init__(self, shape, dtype, scale=None, zero_point=0, axis=0, data=None):
        self.shape, self.dtype, self.scale, self.zero_point = shape, dtype, scale, zero_point
        self.axis, self.data = axis, data

    def added_to(self, model, graph, name):
        from ai_edge_litert import schema_py_generated as schema

        types = {"i1": schema.TensorType.INT8, "i4": schema.TensorType.INT32, "f4": schema.TensorType.FLOAT32}
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type, tensor.buffer = name, list(self.shape), types[self.dtype], 0
        if self.data is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(self.data, self.dtype).tobytes(), np.uint8)
            model.buffers.append(buffer)
            tensor.buffer = len(model.buffers) - 1
        if self.scale is not None:
            grid = schema.QuantizationParametersT()
            grid.scale = np.atleast_1d(np.float32(self.scale))
            grid.zeroPoint = np.full(grid.scale.shape, self.zero_point, np.int64)
            grid.quantizedDimension = self.axis
            tensor.quantization = grid
        graph.tensors.append(tensor)


def litert_op(op, options, version, inputs, tensors):
    """The bytes of a LiteRT model of one op; `tensors` by their names, of which "y" is the result."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.buffers, model.subgraphs, graph.tensors = 3, [schema.BufferT()], [graph], []
    names = list(tensors)
    for name, tensor in tensors.items():
        tensor.added_to(model, graph, name)
    code, node = schema.OperatorCodeT(), schema.OperatorT()
    code.builtinCode, code.version = getattr(schema.BuiltinOperator, op), version
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    kind = type(options).__name__.removesuffix("T")
    node.opcodeIndex, node.builtinOptionsType, node.builtinOptions = 0, getattr(schema.BuiltinOptions, kind), options
    node.inputs, node.outputs = [names.index(n) for n in inputs], [names.index("y")]
    model.operatorCodes, graph.operators = [code], [node]
    graph.inputs = [names.index(n) for n in inputs if tensors[n].data is None]
    graph.outputs = node.outputs
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def run_litert(content, args, kind):
    """The results of a LiteRT model by kernels of a kind, and the names of its ops."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content, num_threads=1, **kernels()[kind])
    interpreter.allocate_tensors()
    for detail, arg in zip(interpreter.get_input_details(), args, strict=True):
        interpreter.set_tensor(detail["index"], arg)
    interpreter.invoke()
    ops = [detail["op_name"] for detail in interpreter._get_ops_details()]
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"]), ops
