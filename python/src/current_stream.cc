#include "current_stream.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include "errors.h"
#include "tandem/error.h"
#include "torch_tensor.h"

namespace tandem::python {
namespace {

nb::object loaded(const char* module) {
  PyObject* const found = PyDict_GetItemString(PyImport_GetModuleDict(), module);
  return found ? nb::borrow(found) : nb::none();
}

StreamNumber of_cupy(const nb::object& cupy) {
  return nb::cast<StreamNumber>(cupy.attr("cuda").attr("get_current_stream")().attr("ptr"));
}

bool is_of(nb::handle object, std::string_view package) {
  const auto module = nb::cast<std::string>(nb::str(object.type().attr("__module__")));
  return module.substr(0, module.find('.')) == package;
}

}  // namespace

StreamNumber current_stream(nb::handle like, int device, std::string_view what,
                            const char* expected) {
  if (is_torch(like)) return torch_stream(device);
  if (is_of(like, "cupy")) return of_cupy(loaded("cupy"));
  throw InvalidArgument(
      fmt::format("{}: x: {}: expected a tensor of {} on cuda:{}, where this rank is", what,
                  type_of(like), expected, device));
}

std::vector<StreamNumber> current_streams(int device) {
  std::vector<StreamNumber> streams;
  if (has_torch_streams()) streams.push_back(torch_stream(device));
  if (const nb::object cupy = loaded("cupy"); !cupy.is_none()) streams.push_back(of_cupy(cupy));
  return streams;
}

}  // namespace tandem::python
