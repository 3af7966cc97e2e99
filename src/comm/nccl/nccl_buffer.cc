#include <fmt/format.h>

#include <exception>

#include "comm/nccl/lsa_pointers.h"
#include "comm/nccl/nccl_communicator.h"

namespace tandem::gpu {

NcclBuffer::NcclBuffer(NcclCommunicator& comm, size_t bytes, int signals) : comm_(comm) {
  const size_t signals_at = (bytes + 127) / 128 * 128;
  const size_t page = NCCL_WIN_REQUIRED_ALIGNMENT;
  const size_t total = (signals_at + size_t(signals) * sizeof(uint64_t) + page) / page * page;
  void* memory = nullptr;
  check(ncclMemAlloc(&memory, total), fmt::format("ncclMemAlloc of {} bytes", total).c_str());
  local_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
  signals_ = signals;
  check(cudaMemset(memory, 0, total), "clear symmetric memory");
  check(cudaDeviceSynchronize(), "clear symmetric memory");
  table_.rank = comm.rank();
  table_.size = comm.size();
  table_.memory[table_.rank] = local_;
  if (comm.size() > 1 && comm.one_node()) {
    check(ncclCommWindowRegister(comm.nccl(), memory, total, &window_, NCCL_WIN_COLL_SYMMETRIC),
          "ncclCommWindowRegister");
    if (!window_) {
      throw Unsupported("nccl: symmetric windows: this machine's GPUs cannot map each other");
    }
    read_lsa_pointers(window_, comm.size(), table_.memory);
    table_.memory[table_.rank] = local_;
  }
  for (int r = 0; r < table_.size; ++r) {
    if (!table_.memory[r]) continue;
    table_.signals[r] = reinterpret_cast<uint64_t*>(table_.memory[r] + signals_at);
  }
  comm.barrier("allocate");  // nobody signals into memory that is still being cleared
}

NcclBuffer::~NcclBuffer() {
  // Peers may still reach this memory; after an error nobody is left to agree on freeing it.
  if (comm_.failed_ || std::uncaught_exceptions() > 0) return;
  cudaDeviceSynchronize();
  try {
    comm_.barrier("free symmetric memory");
  } catch (const Error&) {
    return;
  }
  if (window_) ncclCommWindowDeregister(comm_.nccl(), window_);
  ncclMemFree(local_);
}

}  // namespace tandem::gpu
