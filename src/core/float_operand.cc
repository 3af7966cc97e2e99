#include "core/float_operand.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {

void require_floats(const Exec& exec, std::string_view op, std::string_view name,
                    const Tensor& tensor, int64_t elements) {
  const bool fits = tensor.dtype() == DType::f32 && tensor.contiguous() &&
                    tensor.device().kind == exec.device.kind && tensor.elements() == elements;
  if (fits) return;
  throw InvalidArgument(fmt::format("{}: {} {}: expected {} contiguous f32 on the kernel's device",
                                    op, name, tensor.describe(), elements));
}

}  // namespace tandem
