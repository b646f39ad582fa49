CREATE TABLE alarms (
    id SERIAL NOT NULL,
    name VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    holds BOOLEAN NOT NULL,
    raised_at DOUBLE PRECISION NOT NULL,
    cleared_at DOUBLE PRECISION,
    step INTEGER,
    version INTEGER,
    value DOUBLE PRECISION,
    threshold DOUBLE PRECISION,
    reason TEXT NOT NULL,
    CONSTRAINT pk_alarms PRIMARY KEY (id),
    CONSTRAINT ck_alarms_state CHECK (state IN ('raised', 'cleared')),
    CONSTRAINT ck_alarms_name CHECK (length(name) BETWEEN 1 AND 64),
    CONSTRAINT ck_alarms_cleared_at CHECK ((state = 'cleared') = (cleared_at IS NOT NULL)),
    CONSTRAINT ck_alarms_value_is_finite CHECK (value IS NULL OR (value > -1e300 AND value < 1e300)),
    CONSTRAINT ck_alarms_threshold_is_finite CHECK (threshold IS NULL OR (threshold > -1e300 AND threshold < 1e300))
);
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE clocks (
    boot VARCHAR(64) NOT NULL,
    began_at DOUBLE PRECISION NOT NULL,
    seen_at DOUBLE PRECISION NOT NULL,
    skew DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_clocks PRIMARY KEY (boot)
);
CREATE TABLE deletions (
    msg_id VARCHAR(96) NOT NULL,
    tenant VARCHAR(64) NOT NULL,
    received_at DOUBLE PRECISION NOT NULL,
    deleted_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_deletions PRIMARY KEY (msg_id)
);
CREATE TABLE epochs (
    epoch INTEGER NOT NULL,
    trainer VARCHAR(255) NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    seen_at DOUBLE PRECISION NOT NULL,
    ended_at DOUBLE PRECISION,
    CONSTRAINT pk_epochs PRIMARY KEY (epoch),
    CONSTRAINT ck_epochs_from_one CHECK (epoch >= 1)
);
CREATE TABLE erasures (
    id SERIAL NOT NULL,
    tenant VARCHAR(64) NOT NULL,
    user_id TEXT NOT NULL,
    erased_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_erasures PRIMARY KEY (id),
    CONSTRAINT uq_erasures_tenant_user_id UNIQUE (tenant, user_id)
);
CREATE TABLE exchanges (
    msg_id VARCHAR(96) NOT NULL,
    tenant VARCHAR(64) NOT NULL,
    endpoint VARCHAR(64) NOT NULL,
    user_id TEXT,
    request BYTEA NOT NULL,
    received_at DOUBLE PRECISION NOT NULL,
    latency_s DOUBLE PRECISION NOT NULL, engine SMALLINT, "key" VARCHAR(64), stored_bytes INTEGER DEFAULT '0' NOT NULL,
    CONSTRAINT pk_exchanges PRIMARY KEY (msg_id)
);
CREATE TABLE experiment (
    id SMALLINT NOT NULL,
    project VARCHAR(255) NOT NULL,
    name VARCHAR(255) NOT NULL,
    CONSTRAINT pk_experiment PRIMARY KEY (id),
    CONSTRAINT ck_experiment_only_one CHECK (id = 1)
);
CREATE TABLE exports (
    id SERIAL NOT NULL,
    path TEXT NOT NULL,
    format VARCHAR(16) NOT NULL,
    rows INTEGER NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_exports PRIMARY KEY (id),
    CONSTRAINT uq_exports_path UNIQUE (path)
);
CREATE TABLE feedback (
    id BIGSERIAL NOT NULL,
    event_id VARCHAR(64) NOT NULL,
    call_id VARCHAR(64) NOT NULL,
    tenant VARCHAR(64) NOT NULL,
    msg_id VARCHAR(96),
    choice SMALLINT,
    task_id TEXT,
    run_id TEXT,
    kind VARCHAR(16) NOT NULL,
    metric TEXT NOT NULL,
    value DOUBLE PRECISION,
    text TEXT,
    other_msg_id VARCHAR(96),
    other_choice SMALLINT,
    source TEXT,
    received_at DOUBLE PRECISION NOT NULL,
    occurred_at DOUBLE PRECISION,
    outcome VARCHAR(16) NOT NULL, "key" VARCHAR(64), stored_bytes INTEGER DEFAULT '0' NOT NULL,
    CONSTRAINT pk_feedback PRIMARY KEY (id),
    CONSTRAINT ck_feedback_kind CHECK (kind IN ('number', 'boolean', 'label', 'comment', 'demonstration', 'preference', 'retraction')),
    CONSTRAINT ck_feedback_outcome CHECK (outcome IN ('accepted', 'duplicate', 'unknown', 'late', 'pending')),
    CONSTRAINT ck_feedback_value_is_finite CHECK (value IS NULL OR (value > -1e300 AND value < 1e300)),
    CONSTRAINT ck_feedback_value_of_a_number CHECK ((kind IN ('number', 'boolean')) = (value IS NOT NULL)),
    CONSTRAINT ck_feedback_text_of_words CHECK ((kind IN ('label', 'comment', 'demonstration')) = (text IS NOT NULL)),
    CONSTRAINT ck_feedback_preferred_to_another CHECK ((kind = 'preference') = (other_msg_id IS NOT NULL)),
    CONSTRAINT ck_feedback_about_something CHECK (msg_id IS NOT NULL OR (task_id IS NOT NULL AND run_id IS NOT NULL)),
    CONSTRAINT uq_feedback_event_id UNIQUE (event_id)
);
CREATE TABLE keys (
    key_id VARCHAR(32) NOT NULL,
    digest BYTEA NOT NULL,
    name VARCHAR(64) NOT NULL,
    tenant VARCHAR(64) NOT NULL,
    scopes TEXT NOT NULL,
    requests_per_minute INTEGER,
    tokens_per_minute INTEGER,
    feedback_per_minute INTEGER,
    bytes_per_minute INTEGER,
    max_concurrent INTEGER,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION,
    revoked_at DOUBLE PRECISION, max_stored_bytes BIGINT CONSTRAINT ck_keys_stored CHECK (max_stored_bytes > 0),
    CONSTRAINT pk_keys PRIMARY KEY (key_id),
    CONSTRAINT ck_keys_names CHECK (length(name) BETWEEN 1 AND 64 AND length(tenant) BETWEEN 1 AND 64),
    CONSTRAINT ck_keys_scopes CHECK (length(scopes) > 0),
    CONSTRAINT ck_keys_limits CHECK (requests_per_minute > 0 AND tokens_per_minute > 0 AND feedback_per_minute > 0 AND bytes_per_minute > 0 AND max_concurrent > 0),
    CONSTRAINT uq_keys_digest UNIQUE (digest)
);
CREATE TABLE mismatches (
    id SERIAL NOT NULL,
    engine SMALLINT NOT NULL,
    since DOUBLE PRECISION NOT NULL,
    until DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_mismatches PRIMARY KEY (id),
    CONSTRAINT uq_mismatches_engine_since_until UNIQUE (engine, since, until),
    CONSTRAINT ck_mismatches_range CHECK (since <= until)
);
CREATE TABLE rater_events (
    id BIGSERIAL NOT NULL,
    tenant VARCHAR(64) NOT NULL,
    name TEXT NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    state VARCHAR(16) NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT NOT NULL,
    CONSTRAINT pk_rater_events PRIMARY KEY (id),
    CONSTRAINT ck_rater_events_state CHECK (state IN ('active', 'quarantined'))
);
CREATE TABLE raters (
    tenant VARCHAR(64) NOT NULL,
    name TEXT NOT NULL,
    state VARCHAR(16) NOT NULL,
    reliability DOUBLE PRECISION NOT NULL,
    compared INTEGER NOT NULL,
    events INTEGER NOT NULL,
    extreme INTEGER NOT NULL,
    released BOOLEAN NOT NULL,
    settled BOOLEAN NOT NULL,
    reason TEXT,
    updated_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_raters PRIMARY KEY (tenant, name),
    CONSTRAINT ck_raters_state CHECK (state IN ('active', 'quarantined')),
    CONSTRAINT ck_raters_quarantined_with_reason CHECK ((state = 'quarantined') = (reason IS NOT NULL)),
    CONSTRAINT ck_raters_reliability CHECK (reliability >= 0 AND reliability <= 1),
    CONSTRAINT ck_raters_not_negative CHECK (compared >= 0 AND extreme >= 0 AND events >= extreme)
);
CREATE TABLE reward_rules (
    id SERIAL NOT NULL,
    definition TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_reward_rules PRIMARY KEY (id),
    CONSTRAINT uq_reward_rules_definition UNIQUE (definition)
);
CREATE TABLE stored_by_keys (
    tenant VARCHAR(64) NOT NULL,
    "key" VARCHAR(64) NOT NULL,
    bytes BIGINT NOT NULL,
    CONSTRAINT pk_stored_by_keys PRIMARY KEY (tenant, "key"),
    CONSTRAINT ck_stored_by_keys_not_negative CHECK (bytes >= 0)
);
CREATE TABLE tags (
    tag BYTEA NOT NULL,
    received_at DOUBLE PRECISION NOT NULL,
    msg_id VARCHAR(96) NOT NULL,
    CONSTRAINT pk_tags PRIMARY KEY (tag, received_at, msg_id),
    CONSTRAINT fk_tags_msg_id FOREIGN KEY(msg_id) REFERENCES exchanges (msg_id) ON DELETE CASCADE
)
 /*WITHOUT ROWID*/;
CREATE TABLE versions (
    version INTEGER NOT NULL,
    state VARCHAR(16) NOT NULL,
    step INTEGER NOT NULL,
    epoch INTEGER,
    path TEXT NOT NULL,
    manifest_sha256 VARCHAR(64),
    consumed INTEGER NOT NULL,
    purged INTEGER DEFAULT '0' NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    served_at DOUBLE PRECISION,
    reason TEXT,
    pinned BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT pk_versions PRIMARY KEY (version),
    CONSTRAINT fk_versions_epoch FOREIGN KEY(epoch) REFERENCES epochs (epoch),
    CONSTRAINT ck_versions_state CHECK (state IN ('candidate', 'canary', 'champion', 'rejected', 'rolled_back', 'retired')),
    CONSTRAINT ck_versions_not_negative CHECK (version >= 0 AND step >= 0 AND consumed >= 0),
    CONSTRAINT ck_versions_purged_of_the_consumed CHECK (purged >= 0 AND purged <= consumed),
    CONSTRAINT ck_versions_trained_under_an_epoch CHECK ((version = 0) = (epoch IS NULL)),
    CONSTRAINT ck_versions_manifest CHECK ((version = 0) = (manifest_sha256 IS NULL)),
    CONSTRAINT ck_versions_champion_was_served CHECK (state <> 'champion' OR served_at IS NOT NULL),
    CONSTRAINT ck_versions_rejected_with_reason CHECK ((state IN ('rejected', 'rolled_back')) = (reason IS NOT NULL))
);
CREATE TABLE changed_metadata (
    msg_id VARCHAR(96) NOT NULL,
    metadata TEXT NOT NULL,
    CONSTRAINT pk_changed_metadata PRIMARY KEY (msg_id),
    CONSTRAINT fk_changed_metadata_msg_id FOREIGN KEY(msg_id) REFERENCES exchanges (msg_id) ON DELETE CASCADE
);
CREATE TABLE evaluations (
    version INTEGER NOT NULL,
    evaluator VARCHAR(16) NOT NULL,
    metric VARCHAR(64) NOT NULL,
    slice VARCHAR(64) NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    deviation DOUBLE PRECISION NOT NULL,
    samples INTEGER NOT NULL,
    evaluated_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_evaluations PRIMARY KEY (version, evaluator, metric, slice),
    CONSTRAINT fk_evaluations_version FOREIGN KEY(version) REFERENCES versions (version),
    CONSTRAINT ck_evaluations_evaluator CHECK (evaluator IN ('engine', 'trainer')),
    CONSTRAINT ck_evaluations_samples CHECK (samples >= 1 AND deviation >= 0),
    CONSTRAINT ck_evaluations_value_is_finite CHECK (value > -1e300 AND value < 1e300)
);
CREATE TABLE experiences (
    id BIGSERIAL NOT NULL,
    msg_id VARCHAR(96) NOT NULL,
    choice SMALLINT NOT NULL,
    correction SMALLINT NOT NULL,
    tenant VARCHAR(64) NOT NULL,
    task_id TEXT,
    run_id TEXT,
    priority DOUBLE PRECISION NOT NULL,
    state VARCHAR(16) NOT NULL,
    reason TEXT,
    reward DOUBLE PRECISION,
    reward_rule INTEGER,
    version_min INTEGER NOT NULL,
    version_max INTEGER NOT NULL,
    temperature DOUBLE PRECISION NOT NULL,
    finish_reason VARCHAR(32),
    text TEXT NOT NULL,
    tool_calls BYTEA,
    completion_tokens INTEGER NOT NULL,
    blob BYTEA NOT NULL,
    sampled_at DOUBLE PRECISION NOT NULL,
    rewarded_at DOUBLE PRECISION,
    committed_at DOUBLE PRECISION,
    group_id BIGINT,
    lease_epoch INTEGER,
    lease_until DOUBLE PRECISION,
    trained_version INTEGER, unsampled TEXT, grammar BYTEA,
    CONSTRAINT pk_experiences PRIMARY KEY (id),
    CONSTRAINT uq_experiences_msg_id_choice_correction UNIQUE (msg_id, choice, correction),
    CONSTRAINT ck_experiences_state CHECK (state IN ('recorded', 'rewarded', 'committed', 'leased', 'trained', 'expired', 'dropped')),
    CONSTRAINT ck_experiences_aside_with_reason CHECK ((state IN ('expired', 'dropped')) = (reason IS NOT NULL)),
    CONSTRAINT ck_experiences_rewarded_first CHECK (state NOT IN ('rewarded', 'committed', 'leased', 'trained') OR reward IS NOT NULL),
    CONSTRAINT ck_experiences_reward_is_finite CHECK (reward IS NULL OR (reward > -1e300 AND reward < 1e300)),
    CONSTRAINT ck_experiences_rewarded_at CHECK ((reward IS NULL) = (rewarded_at IS NULL)),
    CONSTRAINT ck_experiences_reward_by_a_rule CHECK ((reward IS NULL) = (reward_rule IS NULL)),
    CONSTRAINT ck_experiences_committed_first CHECK (state NOT IN ('committed', 'leased', 'trained') OR committed_at IS NOT NULL),
    CONSTRAINT ck_experiences_leased_under_an_epoch CHECK ((state = 'leased') = (lease_epoch IS NOT NULL)),
    CONSTRAINT ck_experiences_leased_until CHECK ((state = 'leased') = (lease_until IS NOT NULL)),
    CONSTRAINT ck_experiences_trained_in_a_version CHECK ((state = 'trained') = (trained_version IS NOT NULL)),
    CONSTRAINT ck_experiences_ranges CHECK (version_min <= version_max AND choice >= 0 AND completion_tokens >= 0),
    CONSTRAINT ck_experiences_correction_and_priority CHECK (correction >= 0 AND priority > -1e300 AND priority < 1e300),
    CONSTRAINT ck_experiences_recorded_without_reward CHECK (state <> 'recorded' OR reward IS NULL),
    CONSTRAINT ck_experiences_committed_once_committed CHECK (state NOT IN ('recorded', 'rewarded') OR committed_at IS NULL),
    CONSTRAINT ck_experiences_grouped_once_committed CHECK (group_id IS NULL OR committed_at IS NOT NULL),
    CONSTRAINT fk_experiences_msg_id FOREIGN KEY(msg_id) REFERENCES exchanges (msg_id),
    CONSTRAINT fk_experiences_reward_rule FOREIGN KEY(reward_rule) REFERENCES reward_rules (id),
    CONSTRAINT fk_experiences_lease_epoch FOREIGN KEY(lease_epoch) REFERENCES epochs (epoch),
    CONSTRAINT fk_experiences_trained_version FOREIGN KEY(trained_version) REFERENCES versions (version)
);
CREATE TABLE key_events (
    id BIGSERIAL NOT NULL,
    key_id VARCHAR(32) NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    action VARCHAR(16) NOT NULL,
    actor TEXT NOT NULL,
    CONSTRAINT pk_key_events PRIMARY KEY (id),
    CONSTRAINT ck_key_events_action CHECK (action IN ('created', 'revoked')),
    CONSTRAINT fk_key_events_key_id FOREIGN KEY(key_id) REFERENCES keys (key_id)
);
CREATE TABLE version_events (
    id BIGSERIAL NOT NULL,
    version INTEGER NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    action VARCHAR(16) NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT,
    details TEXT,
    CONSTRAINT pk_version_events PRIMARY KEY (id),
    CONSTRAINT fk_version_events_version FOREIGN KEY(version) REFERENCES versions (version),
    CONSTRAINT ck_version_events_action CHECK (action IN ('published', 'evaluated', 'canary', 'promoted', 'retired', 'rejected', 'rolled_back', 'pinned', 'unpinned', 'mismatch'))
);
INSERT INTO "alembic_version" VALUES('0014');
CREATE INDEX ix_exchanges_user_id ON exchanges (tenant, user_id) WHERE user_id IS NOT NULL;
CREATE INDEX ix_experiences_state_sampled_at ON experiences (state, sampled_at);
CREATE INDEX ix_experiences_trajectory ON experiences (tenant, task_id, run_id) WHERE task_id IS NOT NULL;
CREATE INDEX ix_experiences_trained_version ON experiences (trained_version) WHERE trained_version IS NOT NULL;
CREATE INDEX ix_experiences_leased ON experiences (lease_epoch) WHERE state = 'leased';
CREATE INDEX ix_experiences_committed ON experiences (tenant, id) WHERE state = 'committed';
CREATE INDEX ix_experiences_committed_by_priority ON experiences (tenant, priority DESC, id) WHERE state = 'committed';
CREATE INDEX ix_experiences_committed_by_version ON experiences (version_min) WHERE state = 'committed';
CREATE INDEX ix_experiences_committed_by_age ON experiences (sampled_at) WHERE state = 'committed';
CREATE INDEX ix_experiences_grouped ON experiences (tenant, group_id, id) WHERE state = 'committed' AND group_id IS NOT NULL;
CREATE INDEX ix_experiences_ungrouped ON experiences (id) WHERE state = 'committed' AND group_id IS NULL;
CREATE INDEX ix_feedback_msg_id_received_at ON feedback (msg_id, received_at);
CREATE INDEX ix_feedback_other_msg_id ON feedback (other_msg_id) WHERE other_msg_id IS NOT NULL;
CREATE INDEX ix_feedback_trajectory ON feedback (tenant, task_id, run_id) WHERE msg_id IS NULL;
CREATE INDEX ix_feedback_pending ON feedback (id) WHERE outcome = 'pending';
CREATE INDEX ix_feedback_source ON feedback (tenant, source) WHERE source IS NOT NULL;
CREATE INDEX ix_exchanges_chat ON exchanges (tenant, received_at, msg_id) WHERE endpoint = '/v1/chat/completions';
CREATE INDEX ix_tags_msg_id ON tags (msg_id);
CREATE INDEX ix_experiences_unsampled ON experiences (state, sampled_at) WHERE unsampled IS NOT NULL;
CREATE UNIQUE INDEX ix_alarms_one_open ON alarms (name) WHERE state = 'raised';
CREATE UNIQUE INDEX ix_versions_one_champion ON versions (state) WHERE state = 'champion';
CREATE UNIQUE INDEX ix_versions_one_canary ON versions (state) WHERE state = 'canary';
CREATE UNIQUE INDEX ix_versions_one_pinned ON versions (pinned) WHERE pinned;
CREATE INDEX ix_version_events_version_id ON version_events (version, id);
CREATE INDEX ix_key_events_key_id_id ON key_events (key_id, id);
CREATE INDEX ix_rater_events_tenant_name ON rater_events (tenant, name);
CREATE INDEX ix_experiences_version_min_sampled_at_reward ON experiences (version_min, sampled_at, reward);
CREATE INDEX ix_experiences_sampled_at ON experiences (sampled_at);
CREATE INDEX ix_feedback_early ON feedback (tenant) WHERE outcome = 'pending' AND msg_id IS NOT NULL;
CREATE INDEX ix_feedback_tenant_key_id ON feedback (tenant, "key", id);
CREATE INDEX ix_feedback_rated ON feedback (tenant, "key", id) WHERE kind IN ('number', 'boolean', 'label') AND msg_id IS NOT NULL;
CREATE INDEX ix_experiences_corrections ON experiences (version_min, reward) WHERE correction > 0;
