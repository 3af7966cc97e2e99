#include "overlap/contract/cuda/call_graphs.h"

#include <algorithm>

#include "core/cuda/allocation.h"

namespace tandem::gpu {
namespace {

Priority priority_of(cudaStream_t stream) {
  int priority = 0;
  check(cudaStreamGetPriority(stream, &priority), "a stream's priority");
  return priority < 0 ? Priority::high : Priority::normal;
}

// Redirects operators to another stream during its lifetime.
class StreamGuard {
 public:
  StreamGuard(GpuCommunicator& comm, cudaStream_t stream) : comm_(comm), before_(comm.stream()) {
    comm_.set_stream(stream);
  }
  ~StreamGuard() { comm_.set_stream(before_); }
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  GpuCommunicator& comm_;
  cudaStream_t before_;
};

uint64_t address(const void* pointer) {
  return uint64_t(reinterpret_cast<uintptr_t>(pointer));
}

}  // namespace

CallGraphs::CallGraphs(GpuCommunicator& comm) : comm_(comm), priority_(priority_of(comm.stream())) {
  if (priority_ == Priority::normal) {
    common_.emplace(Common::capture);
  } else {
    local_.emplace(priority_);
  }
}

// Kernels get deadlines by value, so the key includes them.
std::optional<CallGraphs::Key> CallGraphs::key_of(const Call& call) const {
  std::array<uint64_t, 2> allocations{};
  for (size_t i = 0; i < allocations.size(); ++i) {
    if (!call.copied[i] || call.copied[i]->bytes() == 0) continue;  // nothing is copied
    allocations[i] = allocation_of(call.copied[i]->data(), call.copied[i]->bytes());
    if (allocations[i] == 0) return std::nullopt;
  }
  const Operands& o = call.operands;
  return {{uint64_t(call.candidate), allocations[0], allocations[1],
           comm_.device_deadline().deadline_ns, address(o.x.data()), address(o.weight.data()),
           address(o.out.data()), address(o.bias ? o.bias->data() : nullptr),
           address(o.scales ? o.scales->x.data() : nullptr),
           address(o.scales ? o.scales->weight.data() : nullptr), uint64_t(o.accumulate)}};
}

void CallGraphs::run(const Call& call, const std::function<void()>& enqueue) {
  if (enqueue_all_ || !replays_graphs() || is_captured(comm_.stream()) ||
      priority_of(comm_.stream()) != priority_) {
    return comm_.enqueue(enqueue);
  }
  const std::optional<Key> key = key_of(call);
  if (!key) return comm_.enqueue(enqueue);
  const auto [at, is_new] = calls_.try_emplace(*key);
  Entry& entry = at->second;
  entry.used = ++uses_;
  if (is_new) {
    if (calls_.size() > kMaxGraphs) drop_oldest();
    return comm_.enqueue(enqueue);
  }
  if (!entry.graph) {
    entry.graph = capture(enqueue);
    if (comm_.shares_gpu()) entry.graph->upload(comm_.stream());
  }
  comm_.prepare({});
  entry.graph->launch(comm_.stream());
}

Graph CallGraphs::capture(const std::function<void()>& enqueue) {
  const cudaStream_t stream = common_ ? common_->get() : local_->get();
  const StreamGuard guard(comm_, stream);
  return Graph(stream, enqueue);
}

void CallGraphs::drop_oldest() {
  calls_.erase(std::min_element(calls_.begin(), calls_.end(), [](const auto& a, const auto& b) {
    return a.second.used < b.second.used;
  }));
}

}  // namespace tandem::gpu
