#include <fmt/format.h>

#include <exception>

#include "comm/nccl/lsa_pointers.h"
#include "comm/device/gpu_communicator.h"

namespace tandem::gpu {
namespace {

// Collective: `step` on every rank, and an error on all of them where one could not take it. So
// nobody goes on to what all must do together, and waits there.
template <typename Step>
void agree_on(GpuCommunicator& comm, const char* what, const Step& step) {
  std::string failure;
  std::exception_ptr mine;
  try {
    step();
  } catch (const Error& error) {
    failure = error.what();
    mine = std::current_exception();
  }
  const Blobs told = comm.exchange(std::as_bytes(std::span(failure.data(), failure.size())), what);
  if (mine) std::rethrow_exception(mine);
  if (const std::string first = first_failure(told); !first.empty()) throw DeviceError(first);
}

// Where GPUs cannot map each other, NCCL's window is an address of the host's.
bool is_on_device(ncclWindow_t window) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, window), "an NCCL window");
  return attributes.type == cudaMemoryTypeDevice;
}

}  // namespace

void FreeSymmetric::operator()(SymmetricMemory* memory) const {
  if (memory->window && *comm) ncclCommWindowDeregister(*comm, memory->window);
  if (memory->memory) ncclMemFree(memory->memory);
  delete memory;
}

GpuBuffer::GpuBuffer(GpuCommunicator& comm, size_t bytes, int signals)
    : comm_(comm), memory_(new SymmetricMemory, FreeSymmetric{&comm.nccl_}) {
  const size_t signals_at = (bytes + 127) / 128 * 128;
  const size_t page = NCCL_WIN_REQUIRED_ALIGNMENT;
  const size_t total = (signals_at + size_t(signals) * sizeof(uint64_t) + page) / page * page;
  agree_on(comm, "allocate", [&] { obtain(total); });
  local_ = memory_->memory;
  bytes_ = bytes;
  signals_ = signals;
  table_.rank = comm.rank();
  table_.size = comm.size();
  // Behind it nobody signals into memory that is still being cleared.
  agree_on(comm, "allocate, peers", [&] { map_peers(total); });
  table_.memory[table_.rank] = local_;
  for (int r = 0; r < table_.size; ++r) {
    if (!table_.memory[r]) continue;
    table_.signals[r] = reinterpret_cast<uint64_t*>(table_.memory[r] + signals_at);
  }
  number_ = comm.retired_.issue();
}

void GpuBuffer::obtain(size_t total) {
  void* memory = nullptr;
  check(ncclMemAlloc(&memory, total), fmt::format("ncclMemAlloc of {} bytes", total).c_str());
  memory_->memory = static_cast<std::byte*>(memory);
  const cudaStream_t stream = comm_.polls_.get();
  check(cudaMemsetAsync(memory, 0, total, stream), "clear symmetric memory");
  check(cudaStreamSynchronize(stream), "clear symmetric memory");
}

void GpuBuffer::map_peers(size_t total) {
  if (comm_.size() == 1 || !comm_.one_node()) return;
  ncclWindow_t& window = memory_->window;
  check(ncclCommWindowRegister(comm_.nccl(), memory_->memory, total, &window,
                               NCCL_WIN_COLL_SYMMETRIC),
        "ncclCommWindowRegister");
  if (!window || !is_on_device(window)) {
    throw Unsupported("nccl: symmetric windows: this machine's GPUs cannot map each other");
  }
  LsaAddresses& addresses = *comm_.addresses_.get();
  launch_lsa_pointers(window, comm_.size(), &addresses, comm_.polls_.get());
  check(cudaStreamSynchronize(comm_.polls_.get()), "addresses of a window");
  for (int r = 0; r < comm_.size(); ++r) table_.memory[r] = addresses.of[r];
}

GpuBuffer::~GpuBuffer() {
  if (memory_) comm_.retired_.add(number_, std::move(memory_));
}

}  // namespace tandem::gpu
