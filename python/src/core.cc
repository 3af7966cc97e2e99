// tandem._core: the library's Python bindings. Names with a leading underscore are internal to the
// package.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "comm.h"
#include "core/system/isa_level.h"
#include "errors.h"
#include "operand.h"
#include "receipts.h"
#include "tandem/dtype.h"
#include "tandem/version.h"
#include "wire.h"

NB_MODULE(_core, m) {
  using namespace tandem::python;
  using tandem::DType;
  nb::set_leak_warnings(false);  // a traceback may hold a Comm until the process ends
  bind_errors();
  nb::enum_<DType>(m, "DType", "Element types.")
      .value("f32", DType::f32)
      .value("bf16", DType::bf16)
      .value("f16", DType::f16)
      .value("i32", DType::i32)
      .value("u8", DType::u8)
      .value("e4m3", DType::e4m3);
  m.def(
      "_address",
      [](nb::handle x) {
        return reinterpret_cast<uintptr_t>(Operand(x, "_address", "x").tensor().data());
      },
      nb::arg("x").none());
  m.attr("__version__") = TANDEM_VERSION;
  m.attr("__isa__") = tandem::kIsaLevel;
  bind_comm(m);
  bind_world(m);
  bind_operators(m);
  bind_collectives(m);
  bind_collective_objects(m);
  bind_moe(m);
  bind_attention(m);
  bind_receipts(m);
  bind_backend_table(m);
  bind_wire(m);
}
