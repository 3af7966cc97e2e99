#include "core/system/process/processor_time.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>

namespace tandem {
namespace {

double seconds(const timeval& time) {
  return double(time.tv_sec) + 1e-6 * double(time.tv_usec);
}

double used_by(int who) {
  rusage usage{};
  return getrusage(who, &usage) == 0 ? seconds(usage.ru_utime) + seconds(usage.ru_stime) : 0;
}

}  // namespace

ProcessorTime ProcessorTime::now() {
  ProcessorTime time;
  time.wall =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  time.process = used_by(RUSAGE_SELF) + used_by(RUSAGE_CHILDREN);
  std::ifstream stat("/proc/stat");
  std::string name;
  // user, nice, system, idle, iowait, irq, softirq, steal: stolen time counts as busy.
  double ticks[8] = {};
  stat >> name;
  for (double& count : ticks) stat >> count;
  if (stat) {
    time.all = (ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7]) /
               double(sysconf(_SC_CLK_TCK));
  }
  return time;
}

double external_share(const ProcessorTime& begin, const ProcessorTime& end) {
  const double processors = double(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  const double had = processors * (end.wall - begin.wall);
  const double external = (end.all - begin.all) - (end.process - begin.process);
  return had > 0 ? std::clamp(external / had, 0.0, 1.0) : 0;
}

}  // namespace tandem
