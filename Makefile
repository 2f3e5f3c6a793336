# paged: one non-recursive Makefile. Folder = static archive; a new source file needs no listing.
#
#   make            build/bin/paged and build/bin/paged-worker
#   make test       build and run the C tests, then the end-to-end tests (pytest)
#   make bench | check | format | install DESTDIR= PREFIX= | clean
#   make SAN=address,undefined        sanitizer build, in its own folder
#   make fuzz CC=clang                libFuzzer targets, in build-fuzz (scripts/fuzz runs them)
#   make V=1        show commands;  WERROR=1  warnings are errors;  BUILD=DIR  another build folder

# The goal fuzz is a sanitizer build of its own: everything instrumented for libFuzzer, which needs clang.
ifneq ($(filter fuzz,$(MAKECMDGOALS)),)
override SAN := fuzzer-no-link,address,undefined
BUILD   ?= build-fuzz
ifeq ($(origin CC),default)
CC      := clang
endif
endif

SAN     ?=
BUILD   ?= build$(if $(SAN),-$(subst $(comma),-,$(SAN)))
$(if $(BUILD),,$(error BUILD is empty: leave it out, or name a folder))
PREFIX  ?= /usr/local
bindir   = $(PREFIX)/bin
comma   := ,

CC      ?= gcc
AR      ?= ar
PYTHON  ?= python3
Q       := $(if $(V),,@)
say      = $(if $(V),,@echo "  $(1)	$(patsubst $(BUILD)/%,%,$@)";)

# --- flags ------------------------------------------------------------------------------------------------
WARN    := -Wall -Wextra -Wshadow -Wvla -Wundef -Wstrict-prototypes -Wmissing-prototypes \
           -Wno-missing-field-initializers $(if $(WERROR),-Werror)
OPT     ?= $(if $(SAN),-O1,-O2)
DEBUG   ?= $(if $(SAN),1,0)
LLHTTP_INC := $(if $(wildcard /usr/include/llhttp.h),,$(if $(wildcard /usr/share/include/llhttp/llhttp.h),-isystem /usr/share/include/llhttp))
# Debian 12 ships llhttp as C source only: those files are compiled from where the package put them.
LLHTTP_SRC := $(if $(wildcard /usr/include/llhttp.h),,$(wildcard /usr/share/llhttp/*.c))
CFLAGS_ALL := -std=c17 -D_GNU_SOURCE -DPGD_DEBUG=$(DEBUG) $(OPT) -g -fno-omit-frame-pointer -fvisibility=hidden \
              -ffunction-sections -fdata-sections -I. $(WARN) \
              $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=undefined) $(CFLAGS)
LDFLAGS_ALL := -Wl,--gc-sections $(if $(SAN),-fsanitize=$(SAN)) $(LDFLAGS)
LIBS_COMMON := -lcjson -lcrypto -lxxhash -lpthread -lm
LIBS_ENGINE := -luv -lnng $(if $(LLHTTP_SRC),,-lllhttp) -lutf8proc $(LIBS_COMMON)
LIBS_WORKER := -lnng $(LIBS_COMMON)

# A change of flags rebuilds: the flags are written at parse time, and only when they differ.
FLAGS_NOW := $(CC) $(CFLAGS_ALL) $(LDFLAGS_ALL)
$(shell mkdir -p $(BUILD); printf '%s' '$(FLAGS_NOW)' | cmp -s - $(BUILD)/flags || printf '%s' '$(FLAGS_NOW)' > $(BUILD)/flags)

# --- sources ----------------------------------------------------------------------------------------------
MAINS       := engine/main.c worker/main.c
SRC_common  := $(wildcard common/*.c common/model/*.c)
SRC_config  := $(wildcard config/*.c)
SRC_proto   := $(wildcard proto/*.c)
SRC_kernels := $(wildcard kernels/*.c kernels/cpu/*.c)
SRC_engine  := $(filter-out $(MAINS),$(wildcard engine/*.c engine/*/*.c))
SRC_worker  := $(filter-out $(MAINS),$(wildcard worker/*.c worker/*/*.c))
ARCH        := $(shell $(CC) -dumpmachine | cut -d- -f1)
ifneq ($(ARCH),x86_64)
SRC_kernels := $(filter-out %_avx2.c %_avx512.c %_avx512vnni.c,$(SRC_kernels))
endif
ifneq ($(ARCH),aarch64)
SRC_kernels := $(filter-out %_neon.c,$(SRC_kernels))
endif

obj = $(patsubst %.c,$(BUILD)/%.c.o,$(1))
lib = $(BUILD)/lib/$(1).a
LAYERS := common config proto kernels engine worker
LIBS_ENGINE_A := $(foreach l,engine proto config common,$(call lib,$l))
LIBS_WORKER_A := $(foreach l,worker kernels proto config common,$(call lib,$l))
LIBS_ALL_A    := $(foreach l,engine worker kernels proto config common,$(call lib,$l))
LLHTTP_OBJ    := $(patsubst /usr/share/llhttp/%.c,$(BUILD)/llhttp/%.c.o,$(LLHTTP_SRC))

UNIT_SRC := $(wildcard tests/unit/test_*.c tests/kernels/test_*.c tests/sim/test_*.c tests/issues/test_*.c)
UNIT_BIN := $(patsubst %.c,$(BUILD)/%,$(UNIT_SRC))
BENCH_BIN := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/bench/bench_*.c))
# With libFuzzer each target is a fuzzer; in any other build it replays its committed corpus, as one of the unit tests.
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
FUZZ_BIN := $(patsubst %.c,$(BUILD)/%,$(FUZZ_SRC))
FUZZER   := $(findstring fuzzer,$(SAN))

.PHONY: all test test-unit test-e2e bench check format fuzz install clean
.DELETE_ON_ERROR:
.SECONDARY:
all: $(BUILD)/bin/paged $(BUILD)/bin/paged-worker

# --- objects: ISA flags by file name, so that generic objects stay baseline ---------------------------------------
# Under sanitizers -O3 of these files takes minutes (every unrolled load is checked), -O1 seconds; with libFuzzer's
# instrumentation even -O1 does, and fuzz targets run the reference kernels.
ISA_OPT := $(if $(SAN),,-O3)$(if $(FUZZER), -fno-sanitize=all)
ISA = $(if $(filter %_avx2.c,$<),-mavx2 -mfma -mf16c $(ISA_OPT))$(if \
        $(filter %_avx512.c,$<),-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c $(ISA_OPT))$(if \
        $(filter %_avx512vnni.c,$<),-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c $(ISA_OPT))

$(BUILD)/%.c.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,CC)$(CC) $(CFLAGS_ALL) $(if $(filter engine/http/% tests/fuzz/%,$<),$(LLHTTP_INC)) $(ISA) -MMD -MP -c -o $@ $<

$(BUILD)/llhttp/%.c.o: /usr/share/llhttp/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,CC)$(CC) -O2 -g $(if $(SAN),-fsanitize=$(SAN)) $(LLHTTP_INC) -c -o $@ $<

define archive_rule
$(call lib,$(1)): $(call obj,$(SRC_$(1))) $(if $(filter engine,$(1)),$(LLHTTP_OBJ))
	@mkdir -p $$(@D)
	$$(call say,AR)rm -f $$@; $(AR) rcs $$@ $$^
endef
$(foreach l,$(LAYERS),$(eval $(call archive_rule,$l)))

$(BUILD)/bin/paged: $(call obj,engine/main.c) $(LIBS_ENGINE_A)
	@mkdir -p $(@D)
	$(call say,LD)$(CC) $(LDFLAGS_ALL) -o $@ $^ $(LIBS_ENGINE)

$(BUILD)/bin/paged-worker: $(call obj,worker/main.c) $(LIBS_WORKER_A)
	@mkdir -p $(@D)
	$(call say,LD)$(CC) $(LDFLAGS_ALL) -o $@ $^ $(LIBS_WORKER)

export LSAN_OPTIONS := suppressions=$(CURDIR)/tests/lsan.supp:print_suppressions=0

# --- tests ------------------------------------------------------------------------------------------------
$(BUILD)/tests/%: $(BUILD)/tests/%.c.o $(LIBS_ALL_A)
	@mkdir -p $(@D)
	$(call say,LD)$(CC) $(LDFLAGS_ALL) -o $@ $< -Wl,--start-group $(LIBS_ALL_A) -Wl,--end-group -lcmocka $(LIBS_ENGINE)

$(BUILD)/tests/fuzz/%: $(BUILD)/tests/fuzz/%.c.o $(if $(FUZZER),,$(BUILD)/tests/fuzz/replay.c.o) $(LIBS_ALL_A)
	@mkdir -p $(@D)
	$(call say,LD)$(CC) $(LDFLAGS_ALL) $(if $(FUZZER),-fsanitize=fuzzer) -o $@ $(filter %.o,$^) -Wl,--start-group $(LIBS_ALL_A) -Wl,--end-group $(LIBS_ENGINE)

# What the simulation's tests share.
SIM_OBJ := $(call obj,$(wildcard tests/sim/sim_*.c))
# Copies of sources with faults in them, which go before the archive's own, or instead of one of SIM_OBJ.
PLANTED     := $(BUILD)/tests/sim/planted
PLANTED_SRC := $(sort $(shell sed -n 's/^in //p' tests/sim/planted_bugs.txt))
PLANTED_OBJ := $(patsubst %.c,$(PLANTED)/%.c.o,$(PLANTED_SRC) planted_table.c)
$(PLANTED)/stamp: tests/sim/plant tests/sim/planted_bugs.txt $(PLANTED_SRC)
	@mkdir -p $(@D)
	$(call say,PLANT)tests/sim/plant tests/sim/planted_bugs.txt $(@D) && touch $@
$(PLANTED_OBJ): $(PLANTED)/%.c.o: $(PLANTED)/stamp $(BUILD)/flags
	$(call say,CC)$(CC) $(CFLAGS_ALL) -MMD -MP -c -o $@ $(PLANTED)/$*.c
$(BUILD)/tests/sim/test_planted_bugs: $(PLANTED_OBJ)
$(BUILD)/tests/sim/test_planted_bugs: INSTEAD := $(call obj,$(filter tests/sim/%,$(PLANTED_SRC)))
$(filter $(BUILD)/tests/sim/%,$(UNIT_BIN)): %: %.c.o $(SIM_OBJ) $(LIBS_ALL_A)
	@mkdir -p $(@D)
	$(call say,LD)$(CC) $(LDFLAGS_ALL) -o $@ $(filter-out $(INSTEAD),$(filter %.o,$^)) -Wl,--start-group $(LIBS_ALL_A) -Wl,--end-group -lcmocka $(LIBS_ENGINE)

# These start real workers.
$(BUILD)/tests/unit/test_core_loop $(BUILD)/tests/unit/test_core_loop_beat: | $(BUILD)/bin/paged-worker

# T="name ..." narrows to tests whose file begins with test_name or fuzz_name.
test-unit: $(if $(T),$(foreach b,$(UNIT_BIN) $(FUZZ_BIN),$(if $(filter $(foreach t,$(T),test_$t% fuzz_$t%),$(notdir $b)),$b)),$(UNIT_BIN) $(FUZZ_BIN))
	$(Q)scripts/run_unit $^

# The worker with faults at its message boundaries.
CHAOS_WORKER := $(BUILD)/tests/e2e/chaos_worker
$(CHAOS_WORKER): $(call obj,tests/e2e/chaos_worker.c worker/main.c) $(LIBS_WORKER_A)
	@mkdir -p $(@D)
	$(call say,LD)$(CC) $(LDFLAGS_ALL) $(foreach f,nng_sendmsg nng_recvmsg sim_runner_create,-Wl,--wrap=$f) \
		-o $@ $^ $(LIBS_WORKER)

# E2E="file ..." narrows to these arguments of pytest.
test-e2e: all $(CHAOS_WORKER)
	$(Q)PAGED_BUILD=$(abspath $(BUILD)) $(PYTHON) -m pytest -q $(PYTEST_FLAGS) $(or $(E2E),tests/e2e)

test: all
	$(Q)$(MAKE) --no-print-directory test-unit
	$(Q)$(MAKE) --no-print-directory test-e2e

bench: $(BENCH_BIN)
	$(Q)for b in $^; do echo "== $$(basename $$b)"; $$b || exit 1; done

fuzz: $(FUZZ_BIN)

check:
	$(Q)scripts/check_layers
	$(Q)scripts/check_format
	$(Q)scripts/check_headers $(CC)

format:
	$(Q)scripts/check_format --fix

install: all
	install -D -m 755 $(BUILD)/bin/paged $(DESTDIR)$(bindir)/paged
	install -D -m 755 $(BUILD)/bin/paged-worker $(DESTDIR)$(bindir)/paged-worker
	install -D -m 644 config/paged.conf $(DESTDIR)$(PREFIX)/share/paged/paged.conf
	install -D -m 644 config/grafana-dashboard.json $(DESTDIR)$(PREFIX)/share/paged/grafana-dashboard.json
	install -D -m 644 config/paged.service $(DESTDIR)$(PREFIX)/lib/systemd/system/paged.service
	sed -i 's|/usr/local/|$(PREFIX)/|' $(DESTDIR)$(PREFIX)/lib/systemd/system/paged.service
	install -D -m 644 config/paged-worker@.service $(DESTDIR)$(PREFIX)/lib/systemd/system/paged-worker@.service
	sed -i 's|/usr/local/|$(PREFIX)/|' $(DESTDIR)$(PREFIX)/lib/systemd/system/paged-worker@.service
	install -D -m 644 config/paged.socket $(DESTDIR)$(PREFIX)/lib/systemd/system/paged.socket
	install -D -m 644 config/paged.sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/paged.conf
	install -D -m 644 config/models/paged-tiny.gguf $(DESTDIR)$(PREFIX)/share/paged/models/paged-tiny.gguf

clean:
	rm -rf build build-*

-include $(patsubst %.o,%.d,$(call obj,$(foreach l,$(LAYERS),$(SRC_$l)) $(MAINS) $(UNIT_SRC) tests/e2e/chaos_worker.c $(FUZZ_SRC) tests/fuzz/replay.c $(wildcard tests/sim/sim_*.c) $(wildcard tests/bench/bench_*.c)) \
         $(PLANTED_OBJ:.o=.d))
