// The collectives over wire formats on GPU ranks: their checks, and staging that is made at the
// first call of each format.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "codec/cuda/encode.h"
#include "collectives/cuda/encoded_all_reduce.h"
#include "collectives/gpu.h"
#include "core/operands.h"

namespace tandem::gpu {
namespace {

struct EncodedSums {
  std::map<std::pair<std::string, DType>, std::unique_ptr<EncodedAllReduce>> of;
};

void check_operand(const GpuCommunicator& comm, const char* what, const Tensor& tensor) {
  if (tensor.contiguous() && tensor.device() == Device{DeviceKind::cuda, comm.device()}) return;
  throw InvalidArgument(fmt::format("all_reduce: {} {}: expected a contiguous tensor on cuda {}",
                                    what, tensor.describe(), comm.device()));
}

}  // namespace

void all_reduce(Communicator& any, const Tensor& data, const Wire& wire, const Tensor* residual) {
  GpuCommunicator& comm = as_gpu(any);
  require_encodable_on_gpu("all_reduce", wire, data.dtype());
  check_operand(comm, "data", data);
  if (residual) {
    check_operand(comm, "residual", *residual);
    if (residual->dtype() != DType::f32 || residual->elements() != data.elements()) {
      throw InvalidArgument(
          fmt::format("all_reduce: residual {} of data {}: expected f32 of as many elements",
                      residual->describe(), data.describe()));
    }
    require_apart("all_reduce", {{"residual", residual}}, {{"data", &data}});
  }
  comm.check_device();
  if (!comm.one_node()) {
    throw Unsupported(fmt::format(
        "all_reduce: codec {}: expected GPUs that reach each other's memory", wire.describe()));
  }
  if (comm.size() == 1 || data.elements() == 0) return;
  auto& sum = comm.attached<EncodedSums>([] { return new EncodedSums; })
                  .of[{wire.describe(), data.dtype()}];
  if (!sum || sum->max_elements() < data.elements()) {
    const int64_t most = std::max<int64_t>(data.elements(), int64_t(1) << 16);
    sum = std::make_unique<EncodedAllReduce>(comm, wire, data.dtype(), most);
  }
  sum->run(data, data, residual);
}

}  // namespace tandem::gpu
