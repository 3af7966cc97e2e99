// The collectives over wire formats on GPU ranks: their checks, and staging that is made at the
// first call of each format.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "codec/cuda/encode.h"
#include "collectives/cuda/encoded_collectives.h"
#include "collectives/gpu.h"
#include "collectives/rows.h"

namespace tandem::gpu {
namespace {

// By size. A smaller one stays when a larger one is made: captured calls go on using its memory.
struct EncodedBySize {
  std::map<std::pair<std::string, DType>, std::vector<std::unique_ptr<EncodedCollectives>>> of;
};

EncodedCollectives& encoded(GpuCommunicator& comm, const Wire& wire, DType dtype, int64_t largest) {
  auto& all =
      comm.attached<EncodedBySize>([] { return new EncodedBySize; }).of[{wire.describe(), dtype}];
  for (const auto& one : all) {
    if (one->largest() >= largest) return *one;
  }
  // At least twice the last, so that all together are not more than twice the largest.
  const int64_t most =
      std::max({largest, int64_t(1) << 16, all.empty() ? 0 : 2 * all.back()->largest()});
  all.push_back(std::make_unique<EncodedCollectives>(comm, wire, dtype, most));
  return *all.back();
}

void check_call(const GpuCommunicator& comm, const char* op, const Wire& wire,
                std::initializer_list<Operand> tensors, const Tensor& data,
                const Tensor* residual) {
  require_encodable_on_gpu(op, wire, data.dtype());
  const auto check_place = [&](std::string_view what, const Tensor& tensor) {
    if (tensor.contiguous() && tensor.device() == Device{DeviceKind::cuda, comm.device()}) return;
    throw InvalidArgument(fmt::format("{}: {} {}: expected a contiguous tensor on cuda {}", op,
                                      what, tensor.describe(), comm.device()));
  };
  for (const Operand& each : tensors) check_place(each.name, *each.tensor);
  if (residual) {
    check_place("residual", *residual);
    if (residual->dtype() != DType::f32 || residual->elements() != data.elements()) {
      throw InvalidArgument(
          fmt::format("{}: residual {} of data {}: expected f32 of as many elements", op,
                      residual->describe(), data.describe()));
    }
    require_apart(op, {{"residual", residual}}, {{"data", &data}});
  }
  comm.check_device();
  if (comm.one_node()) return;
  throw Unsupported(fmt::format("{}: codec {}: expected GPUs that reach each other's memory", op,
                                wire.describe()));
}

int64_t largest_shard(const GpuCommunicator& comm, const Tensor& whole) {
  if (whole.elements() == 0) return 0;
  const int64_t rows = whole.dim(0);
  return shard_of(rows, comm.size(), 0).count * (whole.elements() / rows);
}

}  // namespace

void all_reduce(Communicator& any, const Tensor& data, const Wire& wire, const Tensor* residual) {
  GpuCommunicator& comm = as_gpu(any);
  check_call(comm, "all_reduce", wire, {{"data", &data}}, data, residual);
  if (comm.size() == 1 || data.elements() == 0) return;
  const int64_t largest = EncodedCollectives::largest_sum(data.elements(), comm.size());
  encoded(comm, wire, data.dtype(), largest).all_reduce(data, data, residual);
}

void reduce_scatter(Communicator& any, const Tensor& data, const Tensor& shard, const Wire& wire,
                    const Tensor* residual) {
  GpuCommunicator& comm = as_gpu(any);
  check_call(comm, "reduce_scatter", wire, {{"data", &data}, {"shard", &shard}}, data, residual);
  collectives::require_shard("reduce_scatter", comm, shard, data);
  collectives::require_place("reduce_scatter", comm, shard, {"data", &data});
  if (data.elements() == 0) return;
  encoded(comm, wire, data.dtype(), largest_shard(comm, data))
      .reduce_scatter(data, shard, residual);
}

void all_gather(Communicator& any, const Tensor& shard, const Tensor& out, const Wire& wire) {
  GpuCommunicator& comm = as_gpu(any);
  check_call(comm, "all_gather", wire, {{"shard", &shard}, {"out", &out}}, out, nullptr);
  collectives::require_shard("all_gather", comm, shard, out);
  collectives::require_place("all_gather", comm, shard, {"out", &out});
  if (out.elements() == 0) return;
  encoded(comm, wire, out.dtype(), largest_shard(comm, out)).all_gather(shard, out);
}

}  // namespace tandem::gpu
