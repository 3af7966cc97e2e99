#include "overlap/moe/cuda/shared.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tandem {
namespace gpu {
namespace {

/// Operators and layers of a communicator. Ranks create them together, so numbers agree; they may
/// destroy them at any time.
struct MoeOperators {
  struct Made {
    uint64_t number = 0;
    std::weak_ptr<MoeOnGpus> op;
  };
  std::map<std::string, Made> by_key;
  uint64_t operators = 0, layers = 0;
};

/// Collective: returns the operator if all ranks still have it, else a new one.
std::shared_ptr<MoeOnGpus> shared_operator(GpuCommunicator& comm, const MoeShape& shape,
                                           const MoeOptions& options, MoeOperators& all) {
  const std::string key = MoeOnGpus::agreed_key(comm, shape, options);
  MoeOperators::Made& made = all.by_key[key];
  std::shared_ptr<MoeOnGpus> op = made.op.lock();
  const uint64_t local = op ? made.number : 0;
  const auto exchanged = comm.exchange(std::as_bytes(std::span(&local, 1)), "moe");
  const bool all_have =
      local != 0 && std::ranges::all_of(exchanged, [&](const auto& blob) {
        return blob.size() == sizeof local && std::memcmp(blob.data(), &local, sizeof local) == 0;
      });
  if (all_have) return op;
  const uint64_t number = ++all.operators;
  op = std::make_shared<MoeOnGpus>(comm, shape, options);
  made = {number, op};
  return op;
}

}  // namespace

SharedMoe::SharedMoe(GpuCommunicator& comm, const MoeShape& shape, const MoeOptions& options) {
  auto& all = comm.attached<MoeOperators>([] { return new MoeOperators; });
  op_ = shared_operator(comm, shape, options, all);
  comm.agree_on("moe: memory of a layer", [&] { layer_.dropped = DeviceMemory(sizeof(uint64_t)); });
  layer_.number = ++all.layers;
  list(op_->forward_receipt(), op_->backward_receipt(), options);
}

}  // namespace gpu

std::unique_ptr<MoeOnRanks> make_gpu_moe(Communicator& comm, const MoeShape& shape,
                                         const MoeOptions& options) {
  return std::make_unique<gpu::SharedMoe>(gpu::as_gpu(comm), shape, options);
}

}  // namespace tandem
