// Slow connections between ranks, told apart from slow ranks by the time of single messages, from
// the traces of a run: OUT/trace (observe/span_stream.h) or OUT/trace.json.
//
// A message is timed from the begin of its send to the end of its receiver's wait, if that waited
// for at least half of it: the time then holds none of either rank's computation. The median of a
// link, one direction of a pair of ranks, is compared with the median of the other links of its
// axis with messages of the same operation, within hosts or between them; those of pipeline stages,
// which have one size, are one operation. Between hosts the mean of both directions is compared,
// from which errors of the clocks cancel; of a link with one direction, the excess must be larger
// than these. Messages within collective calls are not timed.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "observe/rank_records.h"

namespace tandem::report {

struct SlowLink {
  int from = 0, to = 0;   ///< ranks
  bool is_pair = false;   ///< mean of both directions
  std::string operation;  ///< of the messages that lose most time
  double ms = 0;          ///< median time of a message
  double ratio = 1;       ///< over the median of the other links
  double lost_ms = 0;     ///< of a step, over that median
  int64_t messages = 0, other_links = 0;
};

struct LinkOptions {
  double min_ratio = 1.5;
  int64_t min_messages = 8;  ///< of an operation on a link
};

/// Times of the messages between two ranks.
class LinkTimes {
 public:
  struct Message {
    std::string_view operation;
    int from = 0, to = 0;
    double sent_ms = 0, waited_from_ms = 0, received_ms = 0;  ///< on one clock
  };
  void add(const Message& message);
  /// Slower links than others, most lost time first. `steps`: that the messages are of.
  std::vector<SlowLink> find_slow(std::span<const RankPosition> ranks, int64_t steps,
                                  double clock_bound_ms, const LinkOptions& options = {}) const;
  /// Links with enough messages.
  int64_t judged(const LinkOptions& options = {}) const;

 private:
  using Link = std::tuple<std::string, int, int>;  // operation, from, to
  struct Times {
    std::vector<float> ms;  // of the first kMaxTimes
    int64_t messages = 0;
  };
  std::map<Link, Times> links_;
};

struct LinkReport {
  bool has_trace = false;
  int64_t judged = 0, first_step = 0, last_step = 0;
  std::vector<SlowLink> slow;
};
/// Links in the newest steps of a run's traces. Throws IoError for a damaged trace.
LinkReport read_links(const std::string& dir, std::span<const RankHistory> ranks);

/// "TP", "CP", "DP", "PP", or several: axes on which the ranks differ.
std::string axes_between(const RankPosition& a, const RankPosition& b);

}  // namespace tandem::report
