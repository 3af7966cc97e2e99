// Version of the headers. The build reads it from here.
#pragma once

#define TANDEM_VERSION_MAJOR 0
#define TANDEM_VERSION_MINOR 1
#define TANDEM_VERSION_PATCH 0
#define TANDEM_VERSION "0.1.0"
/// Integer for comparisons: 1000 for 0.1.0.
#define TANDEM_VERSION_NUMBER \
  (TANDEM_VERSION_MAJOR * 1000000 + TANDEM_VERSION_MINOR * 1000 + TANDEM_VERSION_PATCH)
