// Measures once per wire format, dtype and power of two of elements, on scratch memory, whether the
// encoded or the uncompressed form of a collective is faster. The stopwatch gives all ranks the
// same times, so all of them choose the same form.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/cuda/encoded_check.h"
#include "collectives/gpu.h"
#include "core/cuda/fill.h"
#include "core/system/env.h"
#include "overlap/collectives/gpu.h"
#include "tune/cuda/measure.h"

namespace tandem::gpu {
namespace {

constexpr int kRepeats = 9;

struct KnownChoices {
  std::map<std::string, bool> encoded;
};

/// A tensor like another, filled with numbers: zeros in f16, whose range in-place sums would
/// exceed.
struct Numbers {
  DeviceMemory memory;
  Tensor tensor;
  Numbers(const Tensor& like, cudaStream_t stream) : memory(std::max<size_t>(like.bytes(), 16)) {
    std::vector<int64_t> shape;
    for (int i = 0; i < like.dims(); ++i) shape.push_back(like.dim(i));
    tensor = Tensor(memory.data(), like.dtype(), std::span<const int64_t>(shape), like.device());
    if (like.dtype() != DType::f16) fill_uniform(tensor, 1, 1, 0, stream);
  }
};

/// Calls run(encodes), on scratch memory.
bool is_faster_encoded(GpuCommunicator& comm, const char* op, const Wire& wire, const Tensor& whole,
                       const std::function<std::function<void(bool)>()>& make) {
  if (!env().tune) return false;
  const std::string key = fmt::format("{} {} {} 2^{}", op, wire.describe(), name_of(whole.dtype()),
                                      std::bit_width(uint64_t(whole.elements())) - 1);
  auto& known = comm.attached<KnownChoices>([] { return new KnownChoices; }).encoded;
  if (const auto found = known.find(key); found != known.end()) return found->second;
  const auto run = make();
  run(true), run(false);  // untimed, as they allocate
  comm.synchronize();
  Stopwatch stopwatch(comm);
  MeasureOptions options;
  options.repeats = kRepeats;
  const auto times = stopwatch.measure({{.name = "uncompressed", .run = [&] { run(false); }},
                                        {.name = wire.describe(), .run = [&] { run(true); }}},
                                       options);
  comm.synchronize();
  return known[key] = times[1].median_us < times[0].median_us;
}

}  // namespace

void all_reduce(Communicator& any, const Tensor& data, const AllowUncompressed& choice,
                const Tensor* residual) {
  GpuCommunicator& comm = as_gpu(any);
  const Wire& wire = choice.wire;
  check_encoded(comm, "all_reduce", wire, {{"data", &data}}, data, residual);
  if (comm.size() == 1 || data.elements() == 0) return;
  const bool encodes = is_faster_encoded(comm, "all_reduce", wire, data, [&] {
    const auto numbers = std::make_shared<Numbers>(data, comm.stream());
    return [&comm, &wire, numbers](bool encoded) {
      if (encoded) return gpu::all_reduce(comm, numbers->tensor, wire, nullptr);
      gpu::all_reduce(comm, numbers->tensor, ReduceOp::sum);
    };
  });
  encodes ? gpu::all_reduce(comm, data, wire, residual)
          : gpu::all_reduce(comm, data, ReduceOp::sum);
}

void all_gather(Communicator& any, const Tensor& shard, const Tensor& out,
                const AllowUncompressed& choice) {
  GpuCommunicator& comm = as_gpu(any);
  const Wire& wire = choice.wire;
  check_encoded(comm, "all_gather", wire, {{"shard", &shard}, {"out", &out}}, out, nullptr,
                Lossless::sent);
  const bool encodes = out.elements() > 0 && is_faster_encoded(comm, "all_gather", wire, out, [&] {
                         const auto local = std::make_shared<Numbers>(shard, comm.stream()),
                                    all = std::make_shared<Numbers>(out, comm.stream());
                         return [&comm, &wire, local, all](bool encoded) {
                           if (encoded)
                             return gpu::all_gather(comm, local->tensor, all->tensor, wire);
                           gpu::all_gather(comm, local->tensor, all->tensor);
                         };
                       });
  encodes ? gpu::all_gather(comm, shard, out, wire) : gpu::all_gather(comm, shard, out);
}

void reduce_scatter(Communicator& any, const Tensor& data, const Tensor& shard,
                    const AllowUncompressed& choice, const Tensor* residual) {
  GpuCommunicator& comm = as_gpu(any);
  const Wire& wire = choice.wire;
  check_encoded(comm, "reduce_scatter", wire, {{"data", &data}, {"shard", &shard}}, data, residual);
  const bool encodes =
      data.elements() > 0 && is_faster_encoded(comm, "reduce_scatter", wire, data, [&] {
        const auto all = std::make_shared<Numbers>(data, comm.stream()),
                   local = std::make_shared<Numbers>(shard, comm.stream());
        return [&comm, &wire, local, all](bool encoded) {
          if (encoded) return gpu::reduce_scatter(comm, all->tensor, local->tensor, wire, nullptr);
          gpu::reduce_scatter(comm, all->tensor, local->tensor, ReduceOp::sum);
        };
      });
  encodes ? gpu::reduce_scatter(comm, data, shard, wire, residual)
          : gpu::reduce_scatter(comm, data, shard, ReduceOp::sum);
}

}  // namespace tandem::gpu
