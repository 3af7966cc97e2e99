#include "comm/device/error_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace tandem::gpu {
namespace {

using Clock = std::chrono::steady_clock;

// Upper bound: a GPU writes the rest of a record within microseconds of its state.
constexpr std::chrono::seconds kWritten{1};

void wait_while(const ErrorRecord& record, int state, Clock::duration limit) {
  const auto until = Clock::now() + limit;
  while (state_of(record) == state && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// By number. Constant-initialized, as other sources add theirs while the program starts.
constinit std::array<std::string_view, 32> op_names = {
    "wait", "all_reduce", "all_gather", "reduce_scatter", "",     "",    "",
    "",     "align",      "all_to_all", "broadcast",      "send", "recv"};

/// Names without a fixed number begin here.
constexpr int kFirstFree = 24;

}  // namespace

std::string_view name_of(OpId op) {
  const auto number = size_t(op);
  return number < op_names.size() && !op_names[number].empty() ? op_names[number] : "?";
}

OpId wait_number(std::string_view op) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const auto found = std::ranges::find(op_names, op);
  if (found != op_names.end()) return OpId(found - op_names.begin());
  const auto free = std::find(op_names.begin() + kFirstFree, op_names.end(), std::string_view());
  if (free == op_names.end()) throw std::logic_error("wait_number: expected at most 32 operations");
  *free = op;
  return OpId(free - op_names.begin());
}

WaitNames::WaitNames(std::initializer_list<std::pair<OpId, std::string_view>> names) {
  for (const auto& [op, name] : names) {
    std::string_view& known = op_names.at(size_t(op));
    if (!known.empty() && known != name) {
      throw std::logic_error(
          fmt::format("operation {} is {}: {}: expected another number", int(op), known, name));
    }
    known = name;
  }
}

int state_of(const ErrorRecord& record) {
  return std::atomic_ref(const_cast<int&>(record.state)).load(std::memory_order_acquire);
}

// Compare-and-swap by a GPU and by the host may not exclude each other over PCIe. If both find
// kNone, the GPU's later stores win, as intended.
void end_waits(ErrorRecord& record) {
  int none = ErrorRecord::kNone;
  std::atomic_ref(record.state).compare_exchange_strong(none, ErrorRecord::kAborted);
}

std::optional<Timeout> timeout_in(const ErrorRecord& record, int rank, double deadline_s,
                                  const std::string& where) {
  wait_while(record, ErrorRecord::kWriting, kWritten);
  if (state_of(record) != ErrorRecord::kTimeout) return std::nullopt;
  const WaitSite site{name_of(OpId(record.op)), record.peer, record.tile};
  return Timeout(Timeout(site, rank, record.epoch, record.seen, deadline_s), where);
}

std::optional<Mismatch> mismatch_in(const ErrorRecord& record, int rank) {
  wait_while(record, ErrorRecord::kWriting, kWritten);
  if (state_of(record) != ErrorRecord::kMismatch) return std::nullopt;
  const auto call = [](uint64_t packed) {
    const CallTag tag = CallTag::unpack(packed);
    const std::string pass =
        tag.backward ? fmt::format("the backward pass of its call {}", tag.forward) : "forward";
    return fmt::format("layer {}, {}", tag.layer, pass);
  };
  return Mismatch(fmt::format("moe: rank {} is in {}; rank {} is in {}: expected the same call",
                              rank, call(record.epoch), record.peer, call(record.seen)));
}

std::optional<Timeout> end_after_abort(ErrorRecord& record, int rank, double deadline_s,
                                       std::chrono::milliseconds grace, const std::string& where) {
  wait_while(record, ErrorRecord::kNone, grace);
  end_waits(record);
  return timeout_in(record, rank, deadline_s, where);
}

}  // namespace tandem::gpu
