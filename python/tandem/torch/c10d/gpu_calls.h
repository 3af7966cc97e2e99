// CUDA tensors of a process group. Calls run on a stream of the group, as those of PyTorch's NCCL
// backend: it waits for the caller's current stream, and Work::wait makes the current stream wait
// for the call without blocking the host. DDP calls from the autograd thread on the stream of the
// backward pass, which goes on meanwhile; on the caller's stream a sum of gradients would delay it.
// FSDP2 calls on streams of its own, which wait for this one.
//
// No header or library of CUDA is needed: c10 has streams and events of any device, so one source
// serves every build of PyTorch.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "queue.h"
#include "tensors.h"
#include "world.h"

namespace tandem_c10d {

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
}

/// The current stream of the current GPU, by a C function of PyTorch with CUDA.
inline CudaStream current_cuda_stream(c10::Device device) {
  using Get = int32_t (*)(int32_t device, void** stream);
  void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  const auto get = reinterpret_cast<Get>(
      library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
  CudaStream stream{};
  TORCH_CHECK(get && get(device.index(), &stream.raw) == 0, "tandem: ", device.str(),
              ": no stream: expected a PyTorch with CUDA");
  return stream;
}

/// World of GPU ranks with its stream.
class GpuWorld {
 public:
  GpuWorld(const TandemTable& table, const GroupArguments& arguments, const Gather& gather,
           c10::Device device)
      : stream_(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
                    .getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
        world_([&] {
          const c10::StreamGuard on_stream(stream_);
          return std::make_unique<World>(table, arguments, gather, current_cuda_stream(device));
        }()) {}

  const c10::Stream& stream() const { return stream_; }
  /// Enqueues call(World&) after the work in the caller's current stream. One thread at a time.
  template <typename Call>
  void run(double deadline_s, const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    c10::Event before(c10::DeviceType::CUDA);
    before.record(current_stream(stream_.device()));
    const c10::StreamGuard on_stream(stream_);
    before.block(stream_);
    const at::AutoDispatchBelowADInplaceOrView raw;
    world_->set_deadline(deadline_s);
    call(*world_);
  }
  /// Throws the error of a call that has failed on the GPU so far.
  void check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    world_->check();
  }
  void abort(const std::string& reason) { world_->abort(reason); }

 private:
  const c10::Stream stream_;
  std::mutex mutex_;
  const std::unique_ptr<World> world_;
};

class GpuWork : public c10d::Work {
 public:
  GpuWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs, Tensors outputs,
          uint64_t number, const std::shared_ptr<GpuWorld>& world)
      : Work(rank, type, title, inputs),
        outputs_(std::move(outputs)),
        number_(number),
        world_(world),
        stream_(world->stream()),
        used_(inputs),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{stream_.device()})) {
    used_.insert(used_.end(), outputs_.begin(), outputs_.end());
  }
  /// Without a `wait`, no stream is known to free the tensors after the call.
  ~GpuWork() override {
    try {
      for (const at::Tensor& x : used_) x.record_stream(stream_);
    } catch (const std::exception&) {  // CUDA has ended
    }
  }

  bool isCompleted() override { return is_enqueued_ && ended_.query(); }
  /// Throws what has failed on the GPU so far.
  bool wait(std::chrono::milliseconds) override {
    TORCH_CHECK(is_enqueued_, "tandem: the call was coalesced with one that failed, or not ended");
    if (const auto world = world_.lock()) world->check();
    ended_.block(current_stream(stream_.device()));
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return number_; }

  /// The call is enqueued on the group's stream.
  void end() {
    const c10::StreamGuard on_stream(stream_);
    ended_.record(stream_);
    is_enqueued_ = true;
    future_->markCompleted(c10::IValue(outputs_));
    finish();
  }

 private:
  const Tensors outputs_;
  const uint64_t number_;
  const std::weak_ptr<GpuWorld> world_;
  const c10::Stream stream_;
  c10::Event ended_{c10::DeviceType::CUDA};
  std::atomic<bool> is_enqueued_ = false;
  std::mutex mutex_;
  Tensors used_;  ///< until a stream waits for the call
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Message to or from another GPU.
struct GpuMessage {
  int peer;
  at::Tensor tensor;
  bool sends;
};

/// Sends and receives all concurrently.
inline void exchange_messages(World& world, const std::vector<GpuMessage>& messages) {
  std::vector<TandemGpuMessage> posted;
  Tensors memory;
  for (const GpuMessage& each : messages) {
    memory.push_back(each.sends ? flat(each.tensor) : flat_result(each.tensor));
    posted.push_back({each.peer, memory.back().data_ptr(), memory.back().nbytes(), each.sends});
  }
  world.exchange(posted);
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!messages[i].sends) copy_back(memory[i], messages[i].tensor);
  }
}

}  // namespace tandem_c10d
