#include "overlap/contract/operator_row.h"

#include <fmt/format.h>

#include "gemm/gemm.h"
#include "tandem/error.h"

namespace tandem {
namespace {

std::unique_ptr<OverlapOperator> make_on_gpu(const OperatorRow& row, Communicator& comm,
                                             const OpDesc& desc, const OverlapOptions& options) {
  if (!row.on_gpu) {
    throw Unsupported(
        fmt::format("{}: on GPUs: expected an operator that has a form for them", row.name));
  }
  try {
    return row.on_gpu(comm, desc, options);
  } catch (const DeviceError& error) {  // out of memory, above all
    throw DeviceError(fmt::format("{} {}: {}", row.name, describe(desc), error.what()));
  }
}

}  // namespace

std::unique_ptr<OverlapOperator> make_operator(const OperatorRow& row, Communicator& comm,
                                               const OpDesc& desc, const OverlapOptions& options,
                                               Choosing choosing) {
  std::unique_ptr<OverlapOperator> made = comm.on_gpu() ? make_on_gpu(row, comm, desc, options)
                                                        : row.on_cpu(comm, desc, options, choosing);
  made->keep(comm);
  return made;
}

OpDesc describe_shard(const OperatorRow& row, const Communicator& comm, OpDesc whole) {
  int64_t& divided = row.collective == Collective::all_gather ? whole.n : whole.k;
  divided = shard_of(divided, comm.size(), comm.rank()).count;
  return row.describe(comm, whole);
}

double error_of_wire(const Wire& wire, DType dtype) {
  if (wire.is_exact()) return 0;
  return wire.error_bound() + (dtype == DType::f32 ? 0 : 0x1p-8);
}

void multiply(const Tensor& x, const Tensor& weight, const Tensor& out) {
  gemm(x, weight.transposed(), out);
}

double gemm_flops(const OpDesc& desc) {
  return 2. * double(desc.m) * double(desc.n) * double(desc.k);
}

int64_t gathered_bytes(int ranks, const OpDesc& d) {
  return d.x.rows * d.x.columns * int64_t(size_of(d.dtype)) * (ranks - 1);
}
int64_t scattered_bytes(int ranks, const OpDesc& d) {
  const int64_t whole = d.m * d.n * int64_t(size_of(d.dtype));
  return whole - whole / ranks;
}

double gathered_error(const OpDesc& d, int, const OperatorRow::Magnitudes& of) {
  return error_of_wire(d.wire, d.dtype) * of.weight_row;
}
// Assumes that other ranks' partial products have a similar magnitude.
double scattered_error(const OpDesc& d, int ranks, const OperatorRow::Magnitudes& of) {
  return (ranks - 1) * error_of_wire(d.wire, d.dtype) * of.partial * 1.5;
}
double summed_error(const OpDesc& d, int ranks, const OperatorRow::Magnitudes& of) {
  const double partial = ranks * error_of_wire(d.wire, d.dtype) * of.partial * 1.5;
  return partial + error_of_wire(d.wire, d.dtype) * (of.expected + partial);
}

}  // namespace tandem
