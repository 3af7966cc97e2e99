#include "observe/rank_records.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Frames of earlier formats lack the last phases.
struct RecordsFormat {
  char magic[9];
  size_t phases;
};
constexpr RecordsFormat kFormats[] = {{"tdmrank3", kPhases}, {"tdmrank2", 12}, {"tdmrank1", 11}};
constexpr std::chrono::milliseconds kFrameTime{80}, kWriteEvery{1000};
constexpr int64_t kMaxSteps = 4096;  // of a frame

struct RecordsHeader {
  char magic[8];
  int64_t begin;
  int64_t began_ns;  // since 1970
  int32_t rank, ranks, tp, dp, pp;
  uint16_t on_gpu;
  uint16_t context;  // cp + 1; 0 without context parallelism, and in earlier files
  char host[64];
};
static_assert(sizeof(RecordsHeader) == 112);

/// Microseconds as mantissa (11 bits) x 2^exponent (5 bits).
uint16_t pack_ms(double ms) {
  const double us = std::clamp(ms * 1e3, 0.0, 4e12);
  int exponent = 0;
  auto mantissa = uint64_t(std::llround(us));
  while (mantissa > 2047) mantissa = uint64_t(std::llround(us / double(1ull << ++exponent)));
  return uint16_t(uint64_t(exponent) << 11 | mantissa);
}
double unpack_ms(uint16_t packed) {
  return double(packed & 2047) * double(1ull << (packed >> 11)) / 1e3;
}

struct PackedFrame {
  uint32_t step;
  uint16_t steps, step_time, phases[kPhases];
};
constexpr size_t frame_bytes(size_t phases) {
  return offsetof(PackedFrame, phases) + phases * sizeof(uint16_t);
}

IoError damaged_records(const std::string& path, const std::string& what) {
  return IoError(fmt::format("{}: {}: expected the records of a rank", printable(path), what));
}

struct Start {
  int64_t begin = 0, began_ns = 0;
  RankHistory history;
};

Start read_start(const std::string& path) {
  RankRecordsReader reader(path);
  if (!reader.read_header()) {
    const FileDescriptor file = open_for_reading(path, Source::no_link);
    throw damaged_records(path, fmt::format("has {} bytes", file_size(file.get(), path)));
  }
  Start start{reader.begin(), reader.began_ns(), {reader.position(), {}}};
  start.history.frames = reader.read_frames(std::numeric_limits<size_t>::max());
  return start;
}

}  // namespace

std::string describe(const RankPosition& position) {
  const std::string cp = position.cp ? fmt::format(" cp {},", *position.cp) : "";
  return fmt::format("tp {},{} dp {}, pp {}, host {}", position.tp, cp, position.dp, position.pp,
                     position.host);
}

RankRecords::RankRecords(const std::string& folder, const RankPosition& position, int64_t begin)
    : path_((reject_link(folder), make_directories(folder),
             fmt::format("{}/{}.from-{}.records", folder, position.rank, begin))),
      file_(path_, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW),
      written_(std::chrono::steady_clock::now()) {
  RecordsHeader header{};
  std::memcpy(header.magic, kFormats[0].magic, sizeof header.magic);
  header.begin = begin;
  header.began_ns =
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  header.rank = position.rank;
  header.ranks = position.ranks;
  header.tp = position.tp, header.dp = position.dp, header.pp = position.pp;
  header.on_gpu = position.on_gpu;
  header.context = position.cp ? uint16_t(*position.cp + 1) : 0;
  std::memcpy(header.host, position.host.data(),
              std::min(position.host.size(), sizeof header.host));
  unwritten_.assign(reinterpret_cast<const char*>(&header), sizeof header);
  append_to(file_.get(), path_, unwritten_);
  sums_.steps = 0;
}

RankRecords::~RankRecords() {
  try {
    end_frame();
    append_to(file_.get(), path_, unwritten_);
  } catch (const Error&) {
    // The run has ended: its records lack the last second.
  }
}

void RankRecords::add(int64_t step, double step_ms, const PhaseTimes& phases) {
  sums_.step = step;
  ++sums_.steps;
  sums_.step_ms += step_ms;
  for (size_t i = 0; i < kPhases; ++i) sums_.phases[i] += phases[i];
  if (step % steps_per_frame_ == 0) end_frame();
  const auto now = std::chrono::steady_clock::now();
  if (now - written_ < kWriteEvery) return;
  written_ = now;
  append_to(file_.get(), path_, unwritten_);
}

void RankRecords::end_frame() {
  if (sums_.steps == 0) return;
  PackedFrame packed{};
  packed.step = uint32_t(sums_.step);
  packed.steps = uint16_t(sums_.steps);
  packed.step_time = pack_ms(sums_.step_ms / sums_.steps);
  for (size_t i = 0; i < kPhases; ++i) packed.phases[i] = pack_ms(sums_.phases[i] / sums_.steps);
  unwritten_.append(reinterpret_cast<const char*>(&packed), frame_bytes(kPhases));
  const double step_ms = std::max(1e-3, sums_.step_ms / sums_.steps);
  steps_per_frame_ = std::min(
      kMaxSteps, int64_t(std::bit_ceil(uint64_t(std::ceil(double(kFrameTime.count()) / step_ms)))));
  sums_ = {};
  sums_.steps = 0;
}

bool RankRecordsReader::read_header() {
  const FileDescriptor file = open_for_reading(path_, Source::no_link);
  RecordsHeader header;
  if (read_at(file.get(), path_, &header, sizeof header, 0) < sizeof header) return false;
  const auto* const format = std::ranges::find_if(kFormats, [&](const RecordsFormat& each) {
    return std::memcmp(header.magic, each.magic, sizeof header.magic) == 0;
  });
  if (format == std::end(kFormats)) throw damaged_records(path_, "has another format");
  frame_bytes_ = frame_bytes(format->phases);
  begin_ = last_step_ = header.begin;
  began_ns_ = header.began_ns;
  position_ = {header.rank,
               header.ranks,
               header.tp,
               header.dp,
               header.pp,
               header.on_gpu != 0,
               std::string(header.host, strnlen(header.host, sizeof header.host)),
               header.context > 0 ? std::optional(header.context - 1) : std::nullopt};
  read_ = sizeof header;
  return true;
}

std::vector<RankFrame> RankRecordsReader::read_frames(size_t max_frames) {
  const FileDescriptor file = open_for_reading(path_, Source::no_link);
  const uint64_t size = file_size(file.get(), path_);
  const uint64_t frames =
      std::min<uint64_t>(size > read_ ? (size - read_) / frame_bytes_ : 0, max_frames);
  std::string bytes(frames * frame_bytes_, '\0');
  bytes.resize(read_at(file.get(), path_, bytes.data(), bytes.size(), read_));
  std::vector<RankFrame> found;
  for (size_t at = 0; at + frame_bytes_ <= bytes.size(); at += frame_bytes_) {
    PackedFrame packed{};
    std::memcpy(&packed, bytes.data() + at, frame_bytes_);
    RankFrame frame{packed.step, packed.steps, unpack_ms(packed.step_time), {}};
    if (frame.steps < 1 || frame.step - frame.steps < last_step_) {
      throw damaged_records(
          path_, fmt::format("the frame at byte {} ends with step {} after step {}", read_,
                             frame.step, last_step_));
    }
    last_step_ = frame.step;
    read_ += frame_bytes_;
    for (size_t i = 0; i < kPhases; ++i) frame.phases[i] = unpack_ms(packed.phases[i]);
    found.push_back(frame);
  }
  return found;
}

std::vector<RankHistory> read_rank_records(const std::string& folder) {
  if (!path_exists(folder)) return {};
  std::map<int, std::vector<Start>> starts;  // by rank
  int64_t newest = -1, begin = 0;            // time and first step of the last start
  int ranks = 0;
  for (const std::string& name : names_in(folder)) {
    if (!name.ends_with(".records")) continue;
    Start start = read_start(folder + "/" + name);
    if (start.began_ns > newest) {
      newest = start.began_ns, begin = start.begin, ranks = start.history.position.ranks;
    }
    starts[start.history.position.rank].push_back(std::move(start));
  }
  std::vector<RankHistory> histories;
  for (auto& [rank, of_rank] : starts) {
    std::ranges::sort(of_rank, {}, &Start::began_ns);
    if (rank >= ranks || of_rank.back().begin != begin) continue;  // not of the last start
    RankHistory history{of_rank.back().history.position, {}};
    for (Start& start : of_rank) {
      std::erase_if(history.frames, [&](const RankFrame& f) { return f.step > start.begin; });
      auto& frames = start.history.frames;
      history.frames.insert(history.frames.end(), frames.begin(), frames.end());
    }
    histories.push_back(std::move(history));
  }
  return histories;
}

}  // namespace tandem
