#include "observe/span_stream.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <map>
#include <utility>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "observe/trace.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr char kRecordMagic[9] = "tdmevts1";
constexpr int kSegments = 4;
/// Bytes of an event as packed, at most.
constexpr int64_t kMaxRecordBytes = int64_t(kMaxEvents) * 512;
constexpr int64_t kMinSegmentBytes = 64 << 10;

struct SegmentName {
  int rank = -1;
  int64_t number = -1;
};

/// "RANK.NUMBER.spans"; a rank below 0 for other names.
SegmentName parse_segment(const std::string& name) {
  SegmentName parsed;
  const char* const end = name.data() + name.size();
  const auto rank = std::from_chars(name.data(), end, parsed.rank);
  if (rank.ec != std::errc() || rank.ptr == end || *rank.ptr != '.') return {};
  const auto number = std::from_chars(rank.ptr + 1, end, parsed.number);
  if (number.ec != std::errc() || std::string_view(number.ptr, end) != ".spans") return {};
  return parsed;
}

std::string segment_path(const std::string& folder, int rank, int64_t number) {
  return fmt::format("{}/{}.{}.spans", folder, rank, number);
}

/// Whether a clock is another one than that read before.
bool counts(const SpanRecord& record, uint64_t clocks_read) {
  return record.kind == SpanRecordKind::clock || clocks_read == 0;
}

int64_t ns_of(TimePoint time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

}  // namespace

SpanWriter::SpanWriter(const std::string& folder, int rank, int ranks, int64_t max_bytes)
    : folder_(folder),
      rank_(rank),
      ranks_(ranks),
      max_segment_bytes_(std::max(max_bytes / kSegments, kMinSegmentBytes)) {
  reject_link(folder);
  make_directories(folder);
  for (const std::string& name : names_in(folder)) {
    const SegmentName segment = parse_segment(name);
    const bool is_foreign = rank == 0 && segment.rank >= ranks;
    if (segment.rank != rank && !is_foreign) continue;
    std::error_code ignored;
    std::filesystem::remove(folder + "/" + name, ignored);
  }
  begin_segment();
}

void SpanWriter::begin_segment() {
  path_ = segment_path(folder_, rank_, number_);
  file_.emplace(path_, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW);
  bytes_ = 0;
  if (number_ >= kSegments) {
    std::error_code ignored;
    std::filesystem::remove(segment_path(folder_, rank_, number_ - kSegments), ignored);
  }
  ++number_;
}

void SpanWriter::write(SpanRecord record, std::span<const std::byte> bytes) {
  std::memcpy(record.magic, kRecordMagic, sizeof record.magic);
  record.rank = rank_, record.ranks = ranks_;
  record.bytes = int64_t(bytes.size());
  std::string text(reinterpret_cast<const char*>(&record), sizeof record);
  text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  bytes_ += int64_t(text.size());
  append_to(file_->get(), path_, text);
}

void SpanWriter::add_clock(const ClockOffset& clock) {
  clock_ = clock;
  write_clock(SpanRecordKind::clock);
}

void SpanWriter::write_clock(SpanRecordKind kind) {
  SpanRecord record{};
  record.kind = kind;
  record.begin_ns = clock_->at;
  write(record, std::as_bytes(std::span(&*clock_, 1)));
}

void SpanWriter::add_events(int64_t step, std::vector<SpanEvent> events, int64_t dropped) {
  if (events.empty() && dropped == 0) return;
  if (bytes_ > max_segment_bytes_) {
    begin_segment();
    if (clock_) write_clock(SpanRecordKind::repeated_clock);
  }
  SpanRecord record{};
  record.step = step;
  record.begin_ns = INT64_MAX;
  for (const SpanEvent& event : events) {
    record.begin_ns = std::min(record.begin_ns, ns_of(event.begin));
  }
  record.dropped = dropped;
  write(record, pack({rank_, std::move(events), {}}));
}

std::vector<std::vector<std::string>> span_segments(const std::string& folder) {
  std::map<int, std::map<int64_t, std::string>> found;
  for (const std::string& name : names_in(folder)) {
    const SegmentName segment = parse_segment(name);
    if (segment.rank >= 0) found[segment.rank][segment.number] = folder + "/" + name;
  }
  if (found.empty()) {
    throw IoError(fmt::format("{}: no events: expected those of a run with trace.stream_mib",
                              printable(folder)));
  }
  const std::string& first = found.begin()->second.begin()->second;
  const FileDescriptor file = open_for_reading(first, Source::no_link);
  SpanRecord record{};
  int ranks = found.rbegin()->first + 1;
  if (read_at(file.get(), first, &record, sizeof record, 0) == sizeof record) {
    ranks = std::max(ranks, std::min(record.ranks, 1 << 20));
  }
  std::vector<std::vector<std::string>> segments;
  for (int rank = 0; rank < ranks; ++rank) {
    if (!found.contains(rank)) {
      throw IoError(fmt::format("{}: no events of rank {}: expected those of {} ranks",
                                printable(folder), rank, ranks));
    }
    auto& of_rank = segments.emplace_back();
    for (auto& [number, path] : found[rank]) of_rank.push_back(std::move(path));
  }
  return segments;
}

StepRange newest_steps(const std::string& folder) {
  StepRange range;
  int rank = 0;
  for (const std::vector<std::string>& segments : span_segments(folder)) {
    SpanReader reader(rank++, {segments.back()}, {});
    reader.next();
    range.first = std::max(range.first, reader.step());
  }
  return range;
}

SpanReader::SpanReader(int rank, std::vector<std::string> segments, const StepRange& range)
    : rank_(rank), segments_(std::move(segments)), range_(range) {
  find_events();
}

std::optional<SpanRecord> SpanReader::peek(Cursor& at) const {
  for (; at.segment < segments_.size(); ++at.segment, at.offset = 0, at.file.reset()) {
    const std::string& path = segments_[at.segment];
    if (!at.file) at.file.emplace(open_for_reading(path, Source::no_link));
    const uint64_t size = file_size(at.file->get(), path);
    SpanRecord record;
    if (size < at.offset + sizeof record) continue;  // the end, or an incomplete record
    read_at(at.file->get(), path, &record, sizeof record, at.offset);
    if (std::memcmp(record.magic, kRecordMagic, sizeof record.magic) != 0 || record.rank != rank_ ||
        record.bytes < 0 || record.bytes > kMaxRecordBytes) {
      throw IoError(
          fmt::format("{}: no record of rank {} at byte {}", printable(path), rank_, at.offset));
    }
    if (size < at.offset + sizeof record + uint64_t(record.bytes)) continue;
    return record;
  }
  return {};
}

void SpanReader::skip(Cursor& at, const SpanRecord& record) {
  at.offset += sizeof record + uint64_t(record.bytes);
}

std::string SpanReader::read_bytes(const Cursor& at, const SpanRecord& record) const {
  std::string bytes(size_t(record.bytes), '\0');
  read_at(at.file->get(), segments_[at.segment], bytes.data(), bytes.size(),
          at.offset + sizeof record);
  return bytes;
}

std::optional<ClockOffset> SpanReader::read_clock(const Cursor& at,
                                                  const SpanRecord& record) const {
  ClockOffset clock;
  const std::string bytes = read_bytes(at, record);
  if (bytes.size() != sizeof clock) {
    throw IoError(fmt::format("{}: a clock of {} bytes at byte {}: expected {}",
                              printable(segments_[at.segment]), bytes.size(), at.offset,
                              sizeof clock));
  }
  std::memcpy(&clock, bytes.data(), sizeof clock);
  return clock;
}

bool SpanReader::find_events() {
  found_.reset();
  while (const auto record = peek(at_)) {
    if (record->kind != SpanRecordKind::events) {
      if (counts(*record, clocks_read_)) {
        clock_ = read_clock(at_, *record);
        ++clocks_read_;
      }
    } else if (range_.contains(record->step)) {
      found_ = record;
      return true;
    }
    skip(at_, *record);
  }
  return false;
}

/// First clock after those before the events, from a cursor of its own.
void SpanReader::find_later_clock() {
  while (clocks_ahead_ <= clocks_read_) {
    const auto record = peek(ahead_);
    if (!record) {
      later_clock_ = clock_;
      return;
    }
    if (record->kind != SpanRecordKind::events && counts(*record, clocks_ahead_)) {
      later_clock_ = read_clock(ahead_, *record);
      ++clocks_ahead_;
    }
    skip(ahead_, *record);
  }
}

void SpanReader::load_events() {
  find_later_clock();
  const ClockOffset first = clock_.value_or(ClockOffset{});
  const ClockOffset last = later_clock_.value_or(first);
  const std::string bytes = read_bytes(at_, *found_);
  RankEvents events;
  try {
    events = unpack(std::as_bytes(std::span(bytes)));
  } catch (const InvalidArgument& error) {
    throw IoError(fmt::format("{}: byte {}: {}", printable(segments_[at_.segment]), at_.offset,
                              error.what()));
  }
  const size_t before = pending_.size();
  for (const SpanEvent& event : events.events) pending_.push_back({ns_of(event.begin), event});
  align_events(events.events, first, last);
  for (size_t i = 0; i < events.events.size(); ++i) pending_[before + i].event = events.events[i];
  std::ranges::stable_sort(pending_, {}, &Pending::begin_ns);
  bound_ns_ = std::max(bound_ns_, bound_between(first, last));
  dropped_ += found_->dropped;
  if (found_->step != step_) {
    before_ns_ = begin_ns_;
    begin_ns_ = found_->begin_ns - offset_at(first, last, found_->begin_ns);
  }
  step_ = found_->step;
  skip(at_, *found_);
  find_events();
}

std::optional<SpanEvent> SpanReader::next() {
  while (found_ && (pending_.empty() || pending_.front().begin_ns > found_->begin_ns)) {
    load_events();
  }
  if (pending_.empty()) return {};
  const SpanEvent event = pending_.front().event;
  pending_.pop_front();
  return event;
}

}  // namespace tandem
