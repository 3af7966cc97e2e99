// Form of a trace in Chrome's JSON, checked strictly, and its slices and arrows.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

struct FormSlice {
  std::string name, kind;
  int rank = 0, track = 0;
  double begin = 0, end = 0;  // us
  nlohmann::json args;
  int role() const { return args.contains("flow") ? args["flow"][0].get<int>() : 0; }
  /// Message or call: of the stream, the number in it.
  std::pair<uint32_t, int64_t> call() const { return {args["flow"][1], args["flow"][2]}; }
};

struct FormArrow {
  std::string name, kind;
  const FormSlice *from = nullptr, *to = nullptr;
  int microbatch = -1;
};

struct TraceForm {
  int unbound =
      0;  ///< arrows that end after their slice: their clocks are off by more than its time
  std::vector<FormSlice> slices;
  std::vector<FormArrow> arrows;
};

/// Shortest slice of a track that contains the time; `slices`: in order.
inline const FormSlice* slice_at(const std::vector<const FormSlice*>& slices, double ts) {
  constexpr double kRounding = .0011;
  const auto after = std::ranges::upper_bound(slices, ts + kRounding, {}, &FormSlice::begin);
  const FormSlice* found = nullptr;
  for (auto at = after; at != slices.begin();) {
    const FormSlice* slice = *--at;
    if (slice->end < ts - kRounding) break;
    if (!found || slice->end - slice->begin < found->end - found->begin) found = slice;
  }
  return found;
}

/// Last slice of a track that ends at most `slack` before the time.
inline const FormSlice* slice_before(const std::vector<const FormSlice*>& slices, double ts,
                                     double slack) {
  const FormSlice* found = nullptr;
  for (const FormSlice* slice : slices) {
    const bool is_near = slice->end <= ts && slice->end >= ts - slack;
    if (is_near && (!found || slice->end > found->end)) found = slice;
  }
  return found;
}

/// Expects: every process and track has a name, slices of a track are in order and do not overlap,
/// every arrow has one start and one end, in this order, each within a slice, or after its end by
/// no more than the clocks' errors.
inline TraceForm check_form(const nlohmann::json& trace) {
  TraceForm form;
  const double bound =
      trace.contains("otherData") ? trace["otherData"].value("clock_bound_us", 0.) : 0;
  const double slack = 2 * bound + .002;  // both ranks' clocks may be off
  std::set<int> processes;
  std::set<std::pair<int, int>> tracks;
  std::map<std::pair<int, int>, double> free_at;
  struct Ends {
    nlohmann::json start, end;
    int starts = 0, ends = 0;
    bool starts_first = false;
  };
  std::map<int64_t, Ends> arrows;
  for (const auto& event : trace.at("traceEvents")) {
    const std::string phase = event.at("ph");
    const std::pair track{event.at("pid").get<int>(), event.at("tid").get<int>()};
    if (phase == "M") {
      if (event.at("name") == "process_name") processes.insert(track.first);
      if (event.at("name") == "thread_name") tracks.insert(track);
      continue;
    }
    EXPECT_TRUE(processes.contains(track.first)) << event;
    EXPECT_TRUE(tracks.contains(track)) << event;
    const double ts = event.at("ts");
    EXPECT_GE(ts, 0) << event;
    if (phase == "X") {
      const double end = ts + event.at("dur").get<double>();
      EXPECT_GE(ts, free_at[track] - .0011) << event;  // in ns, of rounded numbers
      EXPECT_GE(end, ts) << event;
      free_at[track] = end;
      form.slices.push_back({event.at("name"), event.at("cat"), track.first, track.second, ts, end,
                             event.at("args")});
      continue;
    }
    EXPECT_TRUE(phase == "s" || phase == "f") << event;
    Ends& ends = arrows[event.at("id").get<int64_t>()];
    if (phase == "s") {
      ++ends.starts;
      ends.starts_first = ends.ends == 0;
      ends.start = event;
      EXPECT_FALSE(event.contains("bp")) << event;
    } else {
      ++ends.ends;
      ends.end = event;
      EXPECT_EQ(event.value("bp", ""), "e") << event;
    }
  }
  std::map<std::pair<int, int>, std::vector<const FormSlice*>> by_track;
  for (const FormSlice& slice : form.slices) by_track[{slice.rank, slice.track}].push_back(&slice);
  const auto slice_of = [&](const nlohmann::json& event) {
    return slice_at(by_track[{event["pid"], event["tid"]}], event["ts"]);
  };
  for (const auto& [id, ends] : arrows) {
    EXPECT_EQ(ends.starts, 1) << id;
    EXPECT_EQ(ends.ends, 1) << id;
    EXPECT_TRUE(ends.starts_first) << id;
    if (ends.starts != 1 || ends.ends != 1) continue;
    for (const char* key : {"name", "cat"}) EXPECT_EQ(ends.start.at(key), ends.end.at(key)) << id;
    EXPECT_LE(ends.start.at("ts").get<double>(), ends.end.at("ts").get<double>()) << id;
    FormArrow arrow{ends.start.at("name"), ends.start.at("cat")};
    arrow.from = slice_of(ends.start);
    arrow.to = slice_of(ends.end);
    if (!arrow.to) {
      ++form.unbound;
      arrow.to = slice_before(by_track[{ends.end["pid"], ends.end["tid"]}], ends.end["ts"], slack);
    }
    EXPECT_TRUE(arrow.from && arrow.to) << ends.start << ends.end;
    if (ends.start.contains("args")) arrow.microbatch = ends.start["args"].value("microbatch", -1);
    if (arrow.from && arrow.to) form.arrows.push_back(arrow);
  }
  return form;
}

}  // namespace tandem
