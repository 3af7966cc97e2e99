#include "engine/data/stream/shared_work.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/system/process/clock.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr double kSliceS = 1, kShowAfterS = 2;

/// State of a rank in an exchange; the text of its error follows.
struct Standing {
  int64_t done = 0, bytes = 0;
  bool busy = false;
};

}  // namespace

SharedWork::SharedWork(Communicator* world, std::string_view what, int64_t bytes)
    : world_(world),
      what_(what),
      bytes_(bytes),
      slice_s_(world ? std::min(kSliceS, world->deadline() / 4) : kSliceS),
      start_(Clock::now()),
      last_exchange_(start_) {}

void SharedWork::advance(int64_t bytes) {
  done_ += bytes;
  if (seconds_since(last_exchange_) >= slice_s_) exchange_progress(true, "");
}

void SharedWork::finish(const std::string& error) {
  while (exchange_progress(false, error)) {
  }
  if (!error_.empty()) throw IoError(error_);
}

/// Exchanges progress and errors. Returns whether any rank is still busy.
bool SharedWork::exchange_progress(bool busy, const std::string& error) {
  last_exchange_ = Clock::now();
  if (!world_) {
    error_ = error;
    show(done_, bytes_);
    return false;
  }
  const Standing local{done_, bytes_, busy};
  std::vector<std::byte> blob(sizeof local + error.size());
  std::memcpy(blob.data(), &local, sizeof local);
  if (!error.empty()) std::memcpy(blob.data() + sizeof local, error.data(), error.size());
  Standing all;
  for (const auto& given : world_->exchange(blob, what_)) {
    Standing remote;
    std::memcpy(&remote, given.data(), sizeof remote);
    all = {all.done + remote.done, all.bytes + remote.bytes, all.busy || remote.busy};
    if (error_.empty()) {
      error_.assign(reinterpret_cast<const char*>(given.data()) + sizeof remote,
                    given.size() - sizeof remote);
    }
  }
  last_exchange_ = Clock::now();
  if (world_->rank() == 0) show(all.done, all.bytes);
  return all.busy;
}

void SharedWork::show(int64_t done, int64_t all) {
  if (seconds_since(start_) < kShowAfterS) return;
  if (!line_) line_.emplace();
  const std::string of = all > 0 ? " of " + format_bytes(double(all)) : "";
  line_->meanwhile(fmt::format("{}: {}{}", what_, format_bytes(double(done)), of));
}

}  // namespace tandem
