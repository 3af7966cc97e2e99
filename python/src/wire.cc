#include "wire.h"

#include <fmt/format.h>
#include <nanobind/operators.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "current_stream.h"
#include "errors.h"
#include "operand.h"
#include "tandem/error.h"

namespace tandem::python {
namespace {

/// `values`: the values that the message encodes.
std::span<std::byte> bytes_of(const Operand& message, const Operand& values, const char* op,
                              const char* name) {
  const Tensor& tensor = message.tensor();
  const Device expected = values.tensor().device();
  if (tensor.dtype() != DType::u8 || !tensor.contiguous() || tensor.device() != expected) {
    throw InvalidArgument(fmt::format(
        "{}: {}: {}: expected contiguous u8 on {}, where the values are", op, name,
        tensor.describe(),
        expected.kind == DeviceKind::cpu ? "the host" : fmt::format("cuda:{}", expected.index)));
  }
  return {tensor.as<std::byte>(), tensor.bytes()};
}

bool is_on_gpu(const Operand& values) {
  return values.tensor().device().kind == DeviceKind::cuda;
}

nb::object encoded(const Wire& wire, nb::object x, nb::object out) {
  const Operand values(x, "encode", "x");
  const auto maximum = int64_t(wire.bytes(values.tensor().elements(), values.tensor().dtype()));
  const bool fresh = out.is_none();
  if (fresh) out = new_result(x, std::array{maximum}, "encode", "u8");
  size_t used = 0;
  {
    const Operand message(out, "encode", "out");
    if (message.tensor().read_only()) throw InvalidArgument("encode: out: read-only");
    const std::span<std::byte> into = bytes_of(message, values, "encode", "out");
    if (is_on_gpu(values)) {
      const auto stream = current_stream(x, values.tensor().device().index, "encode");
      const nb::gil_scoped_release unlocked;
      encode_on_gpu(wire, values.tensor(), message.tensor(), stream);
      used = size_t(maximum);
    } else {
      const nb::gil_scoped_release unlocked;
      used = encode(wire, values.tensor(), into);
    }
  }
  out = written(x, std::move(out), fresh);
  return out[nb::slice(nb::int_(0), nb::int_(used), nb::int_(1))];
}

nb::object decoded(const Wire& wire, nb::object message, nb::object out) {
  const Operand from(message, "decode", "message"), values(out, "decode", "out");
  const Tensor& into = values.tensor();
  if (into.read_only()) throw InvalidArgument("decode: out: read-only");
  const std::span<const std::byte> bytes = bytes_of(from, values, "decode", "message");
  if (is_on_gpu(values)) {
    const auto stream = current_stream(out, into.device().index, "decode");
    const nb::gil_scoped_release unlocked;
    decode_on_gpu(wire, from.tensor(), into, stream);
  } else {
    const nb::gil_scoped_release unlocked;
    decode(wire, bytes, into);
  }
  return written(out, out);
}

}  // namespace

Wire wire_from(nb::handle codec) {
  if (codec.is_none()) return {};
  if (Wire wire; nb::try_cast(codec, wire)) return wire;
  if (nb::isinstance<nb::str>(codec)) return Wire::parse(nb::cast<std::string>(codec));
  throw InvalidArgument(
      fmt::format("codec: {}: expected a text such as 'int4:g32', or a Wire", type_of(codec)));
}

void bind_wire(nb::module_& m) {
  nb::class_<Wire>(m, "Wire",
                   "A wire format by its text, CODEC[:gGROUP][:asym][:f32|:log2][:spikes]"
                   "[:hadamard], such as\n'int8' or 'int2:g64:asym:spikes' "
                   "(docs/reference/wire-formats.md). What takes codec= takes one, too.\n"
                   "Raises InvalidArgument for another text.")
      .def(
          "__init__",
          [](Wire* self, const std::string& text) { new (self) Wire(Wire::parse(text)); },
          nb::arg("text"))
      .def_prop_ro(
          "group", [](const Wire& w) { return w.group; }, "Elements that share a scale.")
      .def_prop_ro("is_exact", &Wire::is_exact,
                   "Whether decoding gives the bits that were encoded.")
      .def_prop_ro("error_bound", &Wire::error_bound,
                   "The largest |decoded - value| over the largest magnitude of the value's group.")
      .def(
          "bytes",
          [](const Wire& w, int64_t elements, nb::handle dtype) {
            if (elements < 0 || elements > int64_t{1} << 48) {
              throw InvalidArgument(
                  fmt::format("bytes: elements {}: expected 0 to 2^48", elements));
            }
            return w.bytes(elements, dtype_from(dtype));
          },
          nb::arg("elements"), nb::arg("dtype") = "f32",
          "Bytes of a message of so many elements; of 'lossless' at most.")
      .def(
          "bits_per_element",
          [](const Wire& w, nb::handle dtype) { return w.bits_per_element(dtype_from(dtype)); },
          nb::arg("dtype") = "f32", "Of a large message.")
      .def("encode", &encoded, nb::arg("x").none(), nb::arg("out") = nb::none(),
           "The message of x, contiguous f32, bf16 or f16 ('lossless': f32 or bf16) of any shape: "
           "u8\n"
           "[bytes], new or the first of out, u8 of at least bytes(elements, dtype). Raises\n"
           "InvalidArgument.")
      .def("decode", &decoded, nb::arg("message").none(), nb::arg("out").none(),
           "Fills out, contiguous, of the shape and dtype that were encoded, with what `message` "
           "says,\n"
           "and returns it. Raises InvalidArgument for a message that is too short or not of this "
           "format.")
      .def(
          "__eq__", [](const Wire& a, const Wire& b) { return a == b; }, nb::is_operator())
      .def("__hash__", [](const Wire& w) { return nb::hash(nb::cast(w.describe())); })
      .def("__deepcopy__", [](nb::object self, nb::handle) { return self; })
      .def("__str__", &Wire::describe)
      .def("__repr__",
           [](const Wire& w) { return fmt::format("tandem.Wire('{}')", w.describe()); });
}

}  // namespace tandem::python
