#include "kernels/row_ops.h"

#include <string>

#include "kernels/cpu/kernels.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void require_cpu(const Exec& exec, const char* op) {
  if (exec.on_gpu()) throw Unsupported(std::string(op) + ": on a GPU: expected a CPU rank");
}

}  // namespace

void add_bias(const Exec& exec, const Tensor& bias, const Tensor& rows) {
  require_cpu(exec, "add_bias");
  cpu::add_bias(bias, rows);
}

void column_sums(const Exec& exec, const Tensor& rows, const Tensor& sums, bool accumulate) {
  require_cpu(exec, "column_sums");
  cpu::column_sums(rows, sums, accumulate);
}

void rms_norm_heads(const Exec& exec, const Tensor& weight, double eps, const Tensor& rows) {
  require_cpu(exec, "rms_norm_heads");
  cpu::rms_norm_heads(weight, eps, rows);
}

void gate_rows(const Exec& exec, const Tensor& gate, const Tensor& rows) {
  require_cpu(exec, "gate_rows");
  cpu::gate_rows(gate, rows);
}

}  // namespace tandem
