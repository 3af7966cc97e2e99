#include <fmt/format.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "core/system/files.h"
#include "core/system/json.h"
#include "observe/trace.h"
#include "tandem/error.h"

namespace tandem {
namespace {

SpanKind parse_kind(const std::string& name) {
  for (int i = 0; i < kSpanKinds; ++i) {
    if (name_of(SpanKind(i)) == name) return SpanKind(i);
  }
  throw InvalidArgument("category '" + name + "': expected the name of a span kind");
}

int parse_processor(const nlohmann::json& args) {
  const int processor = args.value("processor", -1);
  if (processor < -1 || processor > kMaxProcessor) {
    throw InvalidArgument(
        fmt::format("processor {}: expected at most {}", processor, kMaxProcessor));
  }
  return processor;
}

Flow parse_flow(const nlohmann::json& args) {
  if (!args.contains("flow")) return {};
  const auto& flow = args["flow"];
  const int role = flow.at(0);
  if (role < 0 || role > int(FlowRole::collective)) {
    throw InvalidArgument(fmt::format("flow of role {}: expected 0 to 3", role));
  }
  return {FlowRole(role), flow.at(3), flow.at(1), flow.at(2)};
}

TimePoint at_us(double us) {
  if (!(std::abs(us) < 1e15)) throw InvalidArgument("a time is out of range");
  return TimePoint(std::chrono::nanoseconds(std::llround(us * 1e3)));
}

}  // namespace

std::vector<RankEvents> read_trace(const std::filesystem::path& file, Source source) {
  std::string text;
  try {
    text = read_file(file, source);
  } catch (const IoError& error) {
    throw IoError(fmt::format("trace {}", error.what()));
  }
  std::map<int, RankEvents> ranks;
  int64_t step = -1, bound_ns = -1;
  try {
    const auto trace = parse_json(text);
    if (!trace.is_object() || !trace.contains("traceEvents")) {
      throw InvalidArgument(
          "no trace: expected trace.json of `tandem train`, or what `tandem bench --timeline` "
          "wrote");
    }
    if (trace.contains("otherData")) {
      step = trace["otherData"].value("step", step);
      bound_ns = std::llround(trace["otherData"].value("clock_bound_us", -1e-3) * 1e3);
    }
    for (const auto& event : trace.at("traceEvents")) {
      if (event.at("ph") != "X") continue;
      const int rank = event.at("pid");
      const double ts = event.at("ts"), duration = event.at("dur");
      const auto& args = event.at("args");
      ranks.try_emplace(rank, RankEvents{rank, {}, {}})
          .first->second.events.push_back({parse_kind(event.at("cat")), intern(event.at("name")),
                                           at_us(ts), at_us(ts + duration), args.value("tile", -1),
                                           args.value("peer", -1), parse_processor(args),
                                           parse_flow(args), args.value("microbatch", -1),
                                           args.value("stage", -1)});
    }
  } catch (const nlohmann::json::exception& error) {
    const std::string_view what = error.what();  // "[json.exception.kind.number] text"
    throw IoError(fmt::format("trace {}: an event is not as Tandem writes it: {}", file.string(),
                              what.substr(what.find("] ") + 2)));
  } catch (const InvalidArgument& error) {
    throw IoError(fmt::format("trace {}: {}", file.string(), error.what()));
  }
  std::vector<RankEvents> result;
  for (auto& [number, rank] : ranks) {
    rank.step = step;
    rank.clock_bound_ns = bound_ns;
    result.push_back(std::move(rank));
  }
  return result;
}

}  // namespace tandem
