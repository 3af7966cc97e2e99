#include "overlap/ag_wgrad/cpu.h"

#include "gemm/gemm.h"
#include "observe/recorder.h"
#include "overlap/contract/encoded_candidates.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

namespace {

/// GEMMs of fewer rows cost more in reading and writing dw than their overlap gains.
constexpr int64_t kMinRows = 256;

int wgrad_chunks(int64_t shard_rows) {
  int num_chunks = 1;
  while (num_chunks < 3 && shard_rows >> num_chunks >= kMinRows) ++num_chunks;
  return num_chunks;
}

}  // namespace

AgWgradCpu::AgWgradCpu(Communicator& comm, const OpDesc& desc)
    : rank_(comm.rank()), world_(comm.size()), desc_(desc), gather_(comm, desc) {}

std::vector<Candidate> AgWgradCpu::candidates(const std::vector<int>& chunk_counts) {
  return uncompressed_and_encoded(desc_, [&](bool encoded) {
    return chunked_candidates(chunk_counts,
                              [this, encoded](Strategy form, int chunks, const Operands& operands) {
                                run(form, chunks, encoded, operands);
                              });
  });
}

void AgWgradCpu::multiply(const Range& rows, const Tensor& x, const Operands& operands,
                          bool accumulate) {
  const ScopedLabel label("ag_wgrad", -1);
  gemm(operands.weight.rows(rows.begin, rows.count).transposed(), x, operands.out,
       {.accumulate = accumulate});
}

void AgWgradCpu::run(Strategy form, int chunks, bool encoded, const Operands& operands) {
  const Tensor& x = operands.x;
  const bool serial = form == Strategy::serial;
  const Range local = split(desc_.m, world_, rank_);
  if (world_ == 1) return multiply(local, x, operands, operands.accumulate);
  gather_.begin(chunks, x, false, encoded);
  if (!serial) multiply(local, gather_.local(), operands, operands.accumulate);
  int arrived = 0;
  const auto await_until = [&](int chunk_end) {
    for (; arrived < chunk_end; ++arrived) {
      gather_.await(chunks, ag_source(rank_, world_, 1 + arrived / chunks), arrived % chunks);
    }
  };
  if (serial) {
    await_until((world_ - 1) * chunks);
    multiply(local, gather_.local(), operands, operands.accumulate);
  }
  for (int step = 1; step < world_; ++step) {
    const int owner = ag_source(rank_, world_, step);
    const int num_chunks = wgrad_chunks(split(desc_.m, world_, owner).count);
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      const Range rows = chunk_rows(desc_.m, world_, owner, num_chunks, chunk, Taper::falling);
      const bool last = chunk + 1 == num_chunks;
      const int in_shard =
          last ? chunks
               : chunk_of_row(desc_.m, world_, chunks, rows.end() - 1, Taper::falling) % chunks + 1;
      await_until((step - 1) * chunks + in_shard);
      multiply(rows, gather_.all().rows(rows.begin, rows.count), operands, true);
    }
  }
  gather_.end();
}

}  // namespace tandem
