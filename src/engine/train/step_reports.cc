#include "engine/train/step_reports.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "comm/world/host_ranks.h"
#include "engine/parallel/sync/fragments.h"

namespace tandem {
namespace {

constexpr size_t kMaxReportSteps = 64;  // without a report
constexpr int kNoFragment = -1;

/// Begin of a message; the sums and times follow.
struct ReportHeader {
  uint64_t num_sums = 0, num_times = 0;
  std::array<char, 512> end = {};  // with a 0
};

/// Room for these steps, and the one in which the report leaves.
constexpr size_t kMaxReportBytes =
    sizeof(ReportHeader) + (kMaxReportSteps + 1) * (sizeof(StepSums) + sizeof(StepTimes));

template <typename Record>
std::byte* write_records(const std::vector<Record>& records, std::byte* to) {
  static_assert(std::is_trivially_copyable_v<Record>);
  const auto bytes = std::as_bytes(std::span(records));
  return std::ranges::copy(bytes, to).out;
}

/// Adds a learner's to `totals`, or sets them to the first one's.
template <typename Record>
const std::byte* add_records(const std::byte* from, size_t count, std::vector<Record>& totals) {
  const bool is_first = totals.empty();
  for (size_t i = 0; i < count; ++i, from += sizeof(Record)) {
    Record record;
    std::memcpy(&record, from, sizeof record);
    is_first ? totals.push_back(record) : void(totals[i] += record);
  }
  return from;
}

/// On the ranks' hosts, with the deadline of `learners`.
std::unique_ptr<Communicator> split_hosts(Communicator& learners) {
  auto hosts = split_on_host(learners);
  hosts->set_deadline(learners.deadline());
  return hosts;
}

}  // namespace

bool StepReports::applies(const SyncConfig& sync, const RunConfig& train,
                          const IntegrityConfig& check) {
  return sync.num_learners() > 1 && !sync.is_demo() && train.seconds == 0 && check.action == "off";
}

StepReports::StepReports(Communicator& learners, const SyncConfig& sync)
    : sync_(sync),
      learners_(split_hosts(learners)),
      messages_(*learners_, "step_reports", kMaxReportBytes, learners.size()) {}

void StepReports::end_updates(const std::string& reason) {
  if (end_.empty()) end_ = reason;
}

bool StepReports::is_full() const {
  return sums_.size() >= kMaxReportSteps;
}

bool StepReports::sends(int64_t step) const {
  return fragment_due(sync_, step) || is_full();
}

bool StepReports::receives(int64_t step) const {
  return travels_ && !sync_.has_quorum() && fragment_due(sync_, step - sync_.delay);
}

void StepReports::send() {
  std::byte* const message = messages_.begin_round();
  ReportHeader header{sums_.size(), times_.size(), {}};
  std::ranges::copy(std::string_view(end_).substr(0, header.end.size() - 1), header.end.begin());
  std::memcpy(message, &header, sizeof header);
  const std::byte* const end = write_records(times_, write_records(sums_, message + sizeof header));
  messages_.send(size_t(end - message));
  sums_.clear();
  times_.clear();
  travels_ = true;
}

StepReports::Totals StepReports::receive() {
  travels_ = false;
  Totals totals;
  for (const std::byte* message : messages_.receive(kNoFragment)) {
    ReportHeader header;
    std::memcpy(&header, message, sizeof header);
    const std::byte* const times =
        add_records(message + sizeof header, header.num_sums, totals.sums);
    add_records(times, header.num_times, totals.times);
    totals.ends.emplace_back(header.end.data());
  }
  return totals;
}

}  // namespace tandem
