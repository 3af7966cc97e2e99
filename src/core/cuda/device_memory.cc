#include "core/device_memory.h"

#include <fmt/format.h>

#include <cstring>

#include "core/cuda/current_device.h"
#include "core/cuda/graph.h"
#include "core/cuda/handles.h"
#include "core/cuda/stream_watch.h"
#include "tandem/error.h"

namespace tandem {

std::shared_ptr<std::byte> allocate_on_gpu(size_t bytes, Device device) {
  auto share = gpu::this_share();
  if (share->device() != device.index) {
    throw InvalidArgument(fmt::format("memory of GPU {}: expected this rank's GPU {}", device.index,
                                      share->device()));
  }
  return {share->allocate(bytes),
          [share, bytes](std::byte* memory) { share->free(memory, bytes); }};
}

void copy_bytes(const Exec& exec, const void* from, void* to, size_t bytes) {
  gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, exec.stream), "copy memory");
}

namespace {

class PinnedBytes final : public StagedBytes {
 public:
  explicit PinnedBytes(size_t max_bytes)
      : share_(gpu::this_share()),
        max_bytes_(max_bytes),
        memory_(share_->allocate_host(max_bytes)) {}
  ~PinnedBytes() override {
    cudaEventSynchronize(copied_.get());
    share_->free_idle_host(memory_, max_bytes_);
  }
  PinnedBytes(const PinnedBytes&) = delete;
  PinnedBytes& operator=(const PinnedBytes&) = delete;

  void copy(const Exec& exec, const void* from, void* to, size_t bytes) override {
    if (bytes > max_bytes_) {
      throw InvalidArgument(
          fmt::format("upload of {} bytes: expected at most {}", bytes, max_bytes_));
    }
    gpu::await_event(copied_.get(), exec.stream, "wait for a copy");
    std::memcpy(memory_, from, bytes);
    copy_bytes(exec, memory_, to, bytes);
    copied_.record(exec.stream);
  }

 private:
  std::shared_ptr<gpu::GpuShare> share_;
  size_t max_bytes_;
  void* memory_;
  gpu::Event copied_;
};

class PinnedHost final : public PinnedRange {
 public:
  /// Takes ownership of the registration.
  PinnedHost(void* memory, int device) : memory_(memory), device_(device) {}
  ~PinnedHost() override {
    cudaStreamSynchronize(stream_.get());
    cudaHostUnregister(memory_);
  }
  PinnedHost(const PinnedHost&) = delete;
  PinnedHost& operator=(const PinnedHost&) = delete;

  void begin(const Exec& exec) override {
    source_ = exec.stream;
    begin_.record(exec.stream);
    begin_.block(stream_.get());
  }
  void copy(const void* from, void* to, size_t bytes) override {
    gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_.get()),
               "copy memory to the host");
  }
  void end() override { copied_.record(stream_.get()); }
  void block(const Exec& exec) const override { copied_.block(exec.stream); }
  void wait() const override {
    const gpu::CurrentDevice current(device_);
    gpu::await_event(copied_.get(), source_, kWait);
  }
  // Communicators serve one thread at a time: their checks are for the rank's.
  void wait_unchecked() const override {
    const gpu::CurrentDevice current(device_);
    gpu::poll(
        kWait, [&] { return cudaEventQuery(copied_.get()); }, [](double) {});
  }

 private:
  static constexpr const char* kWait = "wait for a copy to the host";
  void* memory_;
  int device_;
  cudaStream_t source_ = nullptr;  // of the work that the copies follow
  gpu::Stream stream_;
  gpu::Event begin_, copied_;
};

class CudaEvent final : public StreamEvent {
 public:
  void record(const Exec& exec) override { event_.record(exec.stream); }
  void block(const Exec& exec) const override { event_.block(exec.stream); }

 private:
  gpu::Event event_;
};

class CapturedGraph final : public CapturedWork {
 public:
  CapturedGraph(const Exec& exec, const std::function<void()>& enqueue)
      : graph_(exec.stream, enqueue) {}
  void launch(const Exec& exec) const override { graph_.launch(exec.stream); }

 private:
  gpu::Graph graph_;
};

}  // namespace

bool can_capture(const Exec& exec) {
  return exec.on_gpu() && exec.stream != nullptr && exec.stream != cudaStreamLegacy;
}

std::unique_ptr<CapturedWork> capture(const Exec& exec, const std::function<void()>& enqueue) {
  return std::make_unique<CapturedGraph>(exec, enqueue);
}

std::unique_ptr<StreamEvent> make_stream_event() {
  return std::make_unique<CudaEvent>();
}

std::unique_ptr<StagedBytes> make_staged_bytes(size_t max_bytes) {
  return std::make_unique<PinnedBytes>(max_bytes);
}

std::unique_ptr<PinnedRange> pin_host_memory(const Exec& exec, void* memory, size_t bytes) {
  if (!gpu::this_share()->alone()) return nullptr;
  if (cudaHostRegister(memory, bytes, cudaHostRegisterPortable) != cudaSuccess) {
    cudaGetLastError();  // clears it
    return nullptr;
  }
  return std::make_unique<PinnedHost>(memory, exec.device.index);
}

void wait_for_stream(const Exec& exec) {
  gpu::await_stream(exec.stream, "wait for the stream");
}

size_t used_memory(const Exec&) {
  size_t free = 0, all = 0;
  gpu::check(cudaMemGetInfo(&free, &all), "read the GPU's free memory");
  return all - free;
}

void clear_bytes(const Exec& exec, void* memory, size_t bytes) {
  gpu::check(cudaMemsetAsync(memory, 0, bytes, exec.stream), "clear memory");
}

}  // namespace tandem
