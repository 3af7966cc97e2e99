// Calls of a process group: of CPU tensors on the group's thread (queue.h), of CUDA tensors on its
// stream (gpu_calls.h). Both have a world of their own; that of GPUs is connected at their first
// call.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpu_calls.h"
#include "open.h"
#include "queue.h"
#include "tensors.h"
#include "world.h"

namespace tandem_c10d {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

/// A message of CPU tensors in flight: its work, its memory and the tensor it is copied to.
struct InFlight {
  c10::intrusive_ptr<CallWork> work;
  at::Tensor data, to;
  std::string note;
  static void done(void* self, const TandemError* error, int source) {
    const std::unique_ptr<InFlight> message(static_cast<InFlight*>(self));
    std::exception_ptr failure;
    try {
      if (error) throw_error(*error, message->note);
      const at::AutoDispatchBelowADInplaceOrView raw;
      if (message->to.defined()) copy_back(message->data, message->to);
    } catch (...) {
      failure = std::current_exception();
    }
    message->data.reset();
    message->work->set_source(source);
    message->work->end(failure);
  }
};

class Group {
 public:
  /// `prepare_gpus`: called before GPUs are connected.
  Group(const TandemTable& table, const GroupArguments& arguments, const Gather& gather,
        void (*prepare_gpus)())
      : table_(table),
        arguments_(arguments),
        prepare_gpus_(prepare_gpus),
        deadline_s_(arguments.deadline_s),
        world_(std::make_unique<World>(table, arguments, gather)) {
    world_->require_same("backend tandem of torch.distributed",
                         arguments.wire.empty() ? "without a codec" : arguments.wire);
    queue_ = std::make_unique<CallQueue>([this] { world_->share_processors(arguments_.size); });
  }

  uint64_t number() const { return number_; }
  uint64_t bytes_sent() const { return world_ ? world_->bytes_sent() : 0; }
  void set_timeout(Milliseconds timeout) { deadline_s_ = to_seconds(timeout); }
  void abort() {
    const std::string reason = "the process group was aborted";
    if (world_) world_->abort(reason);  // ends the connecting of GPUs, too
    if (const auto gpu = open_gpu()) gpu->abort(reason);
  }
  /// Waits for the calls of CPU tensors, then leaves the worlds.
  void close() {
    if (queue_) queue_->close();
    {
      const std::lock_guard<std::mutex> lock(gpu_mutex_);
      if (gpu_) open_backends().leave(std::exchange(gpu_, nullptr));
    }
    if (world_) open_backends().leave(std::move(world_));
  }

  /// Runs call(World&), which may be after this returns.
  template <typename Call>
  WorkPtr push(OpType type, const char* title, const Tensors& inputs, const Tensors& outputs,
               Milliseconds timeout, Call call) {
    require_open();
    if (const auto device = gpu_of(inputs, outputs)) {
      return coalescing([&] {
        const auto gpu = gpu_world(*device);
        auto work = begin(gpu, type, title, inputs, outputs);
        gpu->run(deadline_of(timeout), [&](World& world) {
          call(world);
          work->end();
        });
        return work;
      });
    }
    auto work = begin(type, title, inputs, outputs);
    queue_->push(work, [this, call = std::move(call), deadline = deadline_of(timeout)] {
      world_->set_deadline(deadline);
      call(*world_);
    });
    return work;
  }

  WorkPtr message(OpType type, const char* title, const at::Tensor& x, int peer, int tag) {
    require_open();
    const bool sends = type == OpType::SEND;
    if (x.is_cuda()) {
      return coalescing([&] { return message_of_gpu(type, title, {peer, x, sends}, tag); });
    }
    const at::AutoDispatchBelowADInplaceOrView raw;
    auto work = begin(type, title, {x}, {x});
    const at::Tensor data = sends ? flat(x) : flat_result(x);
    auto in_flight =
        std::make_unique<InFlight>(InFlight{work, data, sends ? at::Tensor() : x, world_->note()});
    world_->post({.peer = peer,
                  .tag = tag,
                  .data = data.data_ptr(),
                  .bytes = data.nbytes(),
                  .sends = sends,
                  .deadline_s = deadline_s_,
                  .done = &InFlight::done,
                  .context = in_flight.get()});
    in_flight.release();  // NOLINT: `done` has it
    return work;
  }

  /// Blocks until the work in the current stream and the group's calls have ended; no-op without
  /// calls of CUDA tensors.
  void synchronize_gpu(Milliseconds timeout) {
    if (const auto gpu = open_gpu()) {
      gpu->run(deadline_of(timeout), [](World& world) { world.synchronize(); });
    }
  }

  void start_coalescing() { coalesced_.emplace(); }
  /// Work of all calls since.
  WorkPtr end_coalescing() {
    TORCH_CHECK(coalesced_, "tandem: the end of coalescing without its start");
    const Coalesced calls = std::move(*coalesced_);
    coalesced_.reset();
    if (!calls.on_gpu.empty()) return end_on_gpu(calls);
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& work : calls.on_cpu) futures.push_back(work->getFuture());
    return c10d::Work::create_from_future(c10::collectAll(futures));
  }

 private:
  using GpuCalls = std::vector<c10::intrusive_ptr<GpuWork>>;
  struct Coalesced {
    std::vector<c10::intrusive_ptr<CallWork>> on_cpu;
    GpuCalls on_gpu;
    GpuCalls waiting;                  ///< of `messages`
    std::vector<GpuMessage> messages;  ///< enqueued together at the end
  };

  /// A call that fails ends the coalescing that it is in: PyTorch does not.
  template <typename Call>
  WorkPtr coalescing(const Call& call) {
    try {
      return call();
    } catch (...) {
      coalesced_.reset();
      throw;
    }
  }
  static double to_seconds(Milliseconds timeout) {
    return std::clamp(std::chrono::duration<double>(timeout).count(), 0.001, 1e9);
  }
  double deadline_of(Milliseconds timeout) const {
    return timeout <= kNoTimeout ? deadline_s_.load() : to_seconds(timeout);
  }
  void require_open() const {
    TORCH_CHECK(world_, "tandem: the process group was destroyed: expected an open one");
  }
  c10::intrusive_ptr<CallWork> begin(OpType type, const char* title, const Tensors& inputs,
                                     const Tensors& outputs) {
    auto work =
        c10::make_intrusive<CallWork>(arguments_.rank, type, title, inputs, outputs, number_++);
    if (coalesced_) coalesced_->on_cpu.push_back(work);
    return work;
  }
  c10::intrusive_ptr<GpuWork> begin(const std::shared_ptr<GpuWorld>& gpu, OpType type,
                                    const char* title, const Tensors& inputs,
                                    const Tensors& outputs) {
    auto work =
        c10::make_intrusive<GpuWork>(arguments_.rank, type, title, inputs, outputs, number_++, gpu);
    if (coalesced_) coalesced_->on_gpu.push_back(work);
    return work;
  }

  std::shared_ptr<GpuWorld> open_gpu() {
    const std::lock_guard<std::mutex> lock(gpu_mutex_);
    return gpu_;
  }
  /// Collective at the first call, which connects the GPUs through the CPU ranks, in the order of
  /// their calls.
  std::shared_ptr<GpuWorld> gpu_world(c10::Device device) {
    const std::lock_guard<std::mutex> connecting(connecting_);
    std::shared_ptr<GpuWorld> gpu = open_gpu();
    if (!gpu) {
      prepare_gpus_();
      const Gather gather = [this](const void* local, uint64_t bytes, void* all) {
        const auto work = c10::make_intrusive<CallWork>(
            arguments_.rank, OpType::UNKNOWN, "tandem:connect", Tensors{}, Tensors{}, number_);
        queue_->push(work, [this, local, bytes, all] {
          world_->set_deadline(deadline_s_);
          world_->all_gather(local, all, arguments_.size, int64_t(bytes));
        });
        work->wait(kNoTimeout);
      };
      GroupArguments arguments = arguments_;
      arguments.deadline_s = deadline_s_;
      gpu = std::make_shared<GpuWorld>(table_, arguments, gather, device);
      const std::lock_guard<std::mutex> lock(gpu_mutex_);
      gpu_ = gpu;
    }
    TORCH_CHECK_VALUE(gpu->stream().device() == device, "tandem: a tensor on ", device.str(),
                      ": expected ", gpu->stream().device().str(),
                      ", the GPU of this rank's first call");
    return gpu;
  }

  /// Enqueues the messages together; `ended` end with them.
  void exchange(GpuWorld& gpu, const std::vector<GpuMessage>& messages, const GpuCalls& ended) {
    gpu.run(deadline_s_, [&](World& world) {
      if (!messages.empty()) exchange_messages(world, messages);
      for (const auto& work : ended) work->end();
    });
  }
  WorkPtr message_of_gpu(OpType type, const char* title, const GpuMessage& message, int tag) {
    const char* const what = message.sends ? "send" : "recv";
    TORCH_CHECK_VALUE(tag == 0, what, ": tag ", text(tag), ": expected 0 for CUDA tensors");
    TORCH_CHECK_VALUE(message.peer != kTandemAnyPeer, what,
                      ": from any rank: expected a rank for CUDA tensors");
    TORCH_CHECK_VALUE(message.peer != arguments_.rank, what, ": rank ", text(message.peer),
                      ": expected another rank");
    const auto gpu = gpu_world(message.tensor.device());
    auto work = begin(gpu, type, title, {message.tensor}, {message.tensor});
    if (coalesced_) {
      coalesced_->messages.push_back(message);
      coalesced_->waiting.push_back(work);
    } else {
      exchange(*gpu, {message}, {work});
    }
    return work;
  }
  WorkPtr end_on_gpu(const Coalesced& calls) {
    TORCH_CHECK_VALUE(calls.on_cpu.empty(),
                      "tandem: coalesced calls on the CPU and on a GPU: expected one device");
    Tensors used;
    for (const auto& work : calls.on_gpu) {
      const Tensors outputs = work->result();
      used.insert(used.end(), outputs.begin(), outputs.end());
    }
    const auto gpu = open_gpu();
    TORCH_CHECK(gpu, "tandem: the process group was destroyed: expected an open one");
    auto all = begin(gpu, OpType::COALESCED, "tandem:coalesced", {}, used);
    GpuCalls ended = calls.waiting;
    ended.push_back(all);
    exchange(*gpu, calls.messages, ended);
    return all;
  }

  const TandemTable& table_;
  const GroupArguments arguments_;
  void (*const prepare_gpus_)();
  std::atomic<double> deadline_s_;
  std::unique_ptr<World> world_;
  std::unique_ptr<CallQueue> queue_;
  std::mutex connecting_, gpu_mutex_;
  std::shared_ptr<GpuWorld> gpu_;
  std::atomic<uint64_t> number_ = 0;
  std::optional<Coalesced> coalesced_;
};

}  // namespace tandem_c10d
