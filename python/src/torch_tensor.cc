#include "torch_tensor.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <span>
#include <utility>

#include "tandem/error.h"

namespace tandem::python {
namespace {

/// Attributes of PyTorch, once imported: interned names, dtypes by identity.
struct Torch {
  PyTypeObject *tensor = nullptr, *parameter = nullptr;
  PyObject *to_dlpack = nullptr, *grad_enabled = nullptr, *strided = nullptr,
           *tracing_state = nullptr, *current_stream = nullptr;  // null in a build without CUDA
  PyObject *requires_grad = nullptr, *dtype = nullptr, *shape = nullptr, *stride = nullptr,
           *data_ptr = nullptr, *is_cpu = nullptr, *layout = nullptr, *is_neg = nullptr,
           *is_cuda = nullptr, *get_device = nullptr, *is_inference = nullptr,
           *transpose_in_place = nullptr;
  std::array<std::pair<PyObject*, DType>, 6> dtypes{};  // null: not in this version
};

PyObject* attribute(PyObject* object, std::initializer_list<const char*> path) {
  nb::object found = nb::borrow(object);
  for (const char* name : path) found = nb::getattr(found, name, nb::none());
  return found.is_none() ? nullptr : found.release().ptr();
}

const Torch& torch() {
  static Torch known;
  if (known.tensor) return known;
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
  if (!module) return known;
  known.to_dlpack = attribute(module, {"_C", "_to_dlpack"});
  known.grad_enabled = attribute(module, {"is_grad_enabled"});
  known.tracing_state = attribute(module, {"_C", "_get_tracing_state"});
  known.strided = attribute(module, {"strided"});
  known.current_stream = attribute(module, {"_C", "_cuda_getCurrentRawStream"});
  known.parameter = reinterpret_cast<PyTypeObject*>(attribute(module, {"nn", "Parameter"}));
  known.dtypes = {{{attribute(module, {"float32"}), DType::f32},
                   {attribute(module, {"bfloat16"}), DType::bf16},
                   {attribute(module, {"float16"}), DType::f16},
                   {attribute(module, {"int32"}), DType::i32},
                   {attribute(module, {"uint8"}), DType::u8},
                   {attribute(module, {"float8_e4m3fn"}), DType::e4m3}}};
  for (const auto& [name, to] :
       {std::pair{"requires_grad", &known.requires_grad}, std::pair{"dtype", &known.dtype},
        std::pair{"shape", &known.shape}, std::pair{"stride", &known.stride},
        std::pair{"data_ptr", &known.data_ptr}, std::pair{"is_cpu", &known.is_cpu},
        std::pair{"layout", &known.layout}, std::pair{"is_neg", &known.is_neg},
        std::pair{"is_cuda", &known.is_cuda}, std::pair{"get_device", &known.get_device},
        std::pair{"is_inference", &known.is_inference},
        std::pair{"transpose_", &known.transpose_in_place}}) {
    *to = PyUnicode_InternFromString(name);
  }
  if (known.to_dlpack && known.grad_enabled) {
    known.tensor = reinterpret_cast<PyTypeObject*>(attribute(module, {"Tensor"}));
  }
  return known;
}

nb::object get(nb::handle object, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!found.is_valid()) throw nb::python_error();
  return found;
}

nb::object call(nb::handle object, PyObject* method) {
  nb::object found = nb::steal(PyObject_CallMethodNoArgs(object.ptr(), method));
  if (!found.is_valid()) throw nb::python_error();
  return found;
}

/// Parses a tuple of numbers; false if it is not one, as under a tracer, or too long.
bool parse_extents(nb::handle tuple, std::array<int64_t, kMaxDims>& extents, size_t& count) {
  if (!PyTuple_Check(tuple.ptr())) return false;
  count = size_t(PyTuple_GET_SIZE(tuple.ptr()));
  if (count > extents.size()) return false;
  for (size_t i = 0; i < count; ++i) {
    PyObject* const number = PyTuple_GET_ITEM(tuple.ptr(), Py_ssize_t(i));
    if (!PyLong_CheckExact(number)) return false;
    extents[i] = PyLong_AsLongLong(number);
  }
  return true;
}

}  // namespace

bool is_torch(nb::handle object) {
  const Torch& known = torch();
  return known.tensor && PyType_IsSubtype(Py_TYPE(object.ptr()), known.tensor);
}

bool loses_gradient(nb::handle object) {
  if (get(object, torch().requires_grad).ptr() != Py_True) return false;
  const nb::object enabled = nb::steal(PyObject_CallNoArgs(torch().grad_enabled));
  if (!enabled.is_valid()) throw nb::python_error();
  return enabled.ptr() == Py_True;
}

bool is_negated(nb::handle object) {
  return call(object, torch().is_neg).ptr() == Py_True;
}

bool view_torch(nb::handle object, Tensor& tensor) {
  const Torch& known = torch();
  const PyTypeObject* const type = Py_TYPE(object.ptr());
  if (type != known.tensor && type != known.parameter) return false;
  Device device;
  if (get(object, known.is_cpu).ptr() != Py_True) {
    if (get(object, known.is_cuda).ptr() != Py_True) return false;
    device = {DeviceKind::cuda, int(PyLong_AsLong(call(object, known.get_device).ptr()))};
  }
  if (get(object, known.layout).ptr() != known.strided) return false;
  const nb::object dtype = get(object, known.dtype);
  const auto* const found =
      std::find_if(known.dtypes.begin(), known.dtypes.end(),
                   [&](const auto& each) { return each.first == dtype.ptr(); });
  if (found == known.dtypes.end()) return false;
  std::array<int64_t, kMaxDims> shape{}, strides{};
  size_t dims = 0, same = 0;
  if (!parse_extents(get(object, known.shape), shape, dims) ||
      !parse_extents(call(object, known.stride), strides, same) || same != dims) {
    return false;
  }
  void* const data = PyLong_AsVoidPtr(call(object, known.data_ptr).ptr());
  if (!data && PyErr_Occurred()) throw nb::python_error();
  tensor = Tensor(data, found->second, std::span<const int64_t>(shape.data(), dims),
                  std::span<const int64_t>(strides.data(), dims), device);
  return true;
}

// Calls the exporting function directly: Tensor.__dlpack__ is Python code that takes microseconds.
nb::object torch_capsule(nb::handle object) {
  nb::object capsule = nb::steal(PyObject_CallOneArg(torch().to_dlpack, object.ptr()));
  if (!capsule.is_valid()) throw nb::python_error();
  return capsule;
}

bool is_traced() {
  if (!torch().tracing_state) return false;
  const nb::object state = nb::steal(PyObject_CallNoArgs(torch().tracing_state));
  if (!state.is_valid()) throw nb::python_error();
  return !state.is_none();
}

// Transposes a dimension with itself: an in-place no-op in every PyTorch version that increments
// the tensor's version.
void count_write(nb::handle object) {
  const Torch& known = torch();
  if (call(object, known.is_inference).ptr() == Py_True) return;
  static PyObject* const zero = PyLong_FromLong(0);
  const nb::object counted = nb::steal(
      PyObject_CallMethodObjArgs(object.ptr(), known.transpose_in_place, zero, zero, nullptr));
  if (!counted.is_valid()) throw nb::python_error();
}

bool has_torch_streams() {
  const Torch& known = torch();
  if (!known.tensor || !known.current_stream) return false;
  const nb::object cuda = nb::module_::import_("torch.cuda");
  return nb::cast<bool>(cuda.attr("is_initialized")());
}

uintptr_t torch_stream(int device) {
  if (!torch().current_stream) {
    throw InvalidArgument("this PyTorch is built without CUDA: expected one with it on a GPU rank");
  }
  const nb::object index = nb::steal(PyLong_FromLong(device));
  const nb::object stream = nb::steal(PyObject_CallOneArg(torch().current_stream, index.ptr()));
  if (!stream.is_valid()) throw nb::python_error();
  const auto number = reinterpret_cast<uintptr_t>(PyLong_AsVoidPtr(stream.ptr()));
  if (!number && PyErr_Occurred()) throw nb::python_error();
  return number;
}

}  // namespace tandem::python
